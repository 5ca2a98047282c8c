//! A filter of the agent's system calls. It denies new unix sockets, by whichever call they are made, netlink sockets,
//! and further filters.
//!
//! The run's socket is the only unix socket that the agent needs, and it reaches that socket through a local port. The
//! filter stays with all its children. It keeps them from every other socket that a mount brings into the sandbox or
//! that an image contains. Pairs of connected sockets (`socketpair`) are allowed: they reach only processes that
//! inherit them.
//!
//! Two objects use memory of the whole machine that no control group counts. One is unread data of a netlink socket.
//! The other is compiled filters, for which the kernel has a fixed pool (`net.core.bpf_jit_limit`). A sandbox that
//! filled the pool would prevent every other sandbox from starting. Both calls are answered like a kernel without the
//! feature does, so that libraries continue without it.

#![expect(
    clippy::cast_possible_truncation,
    reason = "libc's constants are wider than the fields of an instruction that they are for"
)]

use std::io;

use libc::sock_filter;

use super::options::UnixSocketPolicy;

/// Applies the filter to the calling thread, for good. The call needs `no_new_privs` and no other privilege.
#[expect(unsafe_code, reason = "there is no safe call that sets a filter of system calls")]
pub(crate) fn restrict_calls(unix_sockets: UnixSocketPolicy) -> io::Result<()> {
    let instructions = match unix_sockets {
        UnixSocketPolicy::Denied => &DENY_UNIX_SOCKETS,
        UnixSocketPolicy::Allowed => &ALLOW_UNIX_SOCKETS,
    };
    let program = libc::sock_fprog {
        len: instructions.len().try_into().expect("the program has twenty instructions"),
        filter: instructions.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program, which is static, and does not write to it.
    let done =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

static DENY_UNIX_SOCKETS: [sock_filter; 20] = program(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32);
static ALLOW_UNIX_SOCKETS: [sock_filter; 20] = program(libc::SECCOMP_RET_ALLOW);

/// Returns the filter in the kernel's instruction format. Jump targets count from the next instruction. `unix` is the
/// answer to `socket(AF_UNIX, …)`.
const fn program(unix: u32) -> [sock_filter; 20] {
    [
        /* 0 */ bpf_load(OFFSET_ARCH),
        // Another architecture numbers its calls differently: i386's `socketcall` on x86-64 would pass unchecked.
        /* 1 */
        jump_if_equal(NATIVE_ARCH, 1, 0),
        /* 2 */ bpf_return(libc::SECCOMP_RET_KILL_PROCESS),
        /* 3 */ bpf_load(OFFSET_SYSCALL),
        // The calls of x32 would pass too: they have the architecture of x86-64, and this bit in their number.
        /* 4 */
        jump_if_at_least(X32_SYSCALL_BIT, 11, 0),
        // An io_uring creates sockets without a system call for each.
        /* 5 */
        jump_if_equal(libc::SYS_io_uring_setup as u32, 10, 0),
        /* 6 */ jump_if_equal(libc::SYS_seccomp as u32, 12, 0),
        /* 7 */ jump_if_equal(libc::SYS_prctl as u32, 2, 0),
        /* 8 */ jump_if_equal(libc::SYS_socket as u32, 3, 0),
        /* 9 */ bpf_return(libc::SECCOMP_RET_ALLOW),
        /* 10 */ bpf_load(FIRST_ARGUMENT),
        /* 11 */ jump_if_equal(libc::PR_SET_SECCOMP as u32, 5, 3),
        /* 12 */ bpf_load(FIRST_ARGUMENT),
        /* 13 */ jump_if_equal(libc::AF_UNIX as u32, 4, 0),
        /* 14 */ jump_if_equal(libc::AF_NETLINK as u32, 4, 0),
        /* 15 */ bpf_return(libc::SECCOMP_RET_ALLOW),
        /* 16 */ bpf_return(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        // The answers of a kernel without filters, then without the call, or without this family of sockets.
        /* 17 */
        bpf_return(libc::SECCOMP_RET_ERRNO | libc::EINVAL as u32),
        /* 18 */ bpf_return(unix),
        /* 19 */ bpf_return(libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32),
    ]
}

/// Offsets in `struct seccomp_data`. A socket family and a prctl option are an `int`, so the lower half of the first
/// argument is all of it.
const OFFSET_SYSCALL: u32 = 0;
const OFFSET_ARCH: u32 = 4;
const FIRST_ARGUMENT: u32 = 16;

/// `AUDIT_ARCH_X86_64` and `AUDIT_ARCH_AARCH64` of linux/audit.h: the ELF machine, 64 bits, little endian.
#[cfg(target_arch = "x86_64")]
const NATIVE_ARCH: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const NATIVE_ARCH: u32 = 0xc000_00b7;

/// `__X32_SYSCALL_BIT`. No call of another architecture has such a high number.
const X32_SYSCALL_BIT: u32 = 0x4000_0000;

const fn bpf_load(offset: u32) -> sock_filter {
    sock_filter {
        code: (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16,
        jt: 0,
        jf: 0,
        k: offset,
    }
}

const fn jump_if_equal(value: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, jt, jf, k: value }
}

const fn jump_if_at_least(value: u32, jt: u8, jf: u8) -> sock_filter {
    sock_filter { code: (libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K) as u16, jt, jf, k: value }
}

const fn bpf_return(value: u32) -> sock_filter {
    sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: value }
}
