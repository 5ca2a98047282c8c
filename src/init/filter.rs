//! A filter of system calls for the agent: no new unix socket, by whichever way one is made.
//!
//! The run's socket is the only one the agent has a use for, and it has that one as a local port. A filter that stays
//! with all its children keeps it from every other socket that a mount may bring into the sandbox, or that an image
//! holds. Pairs of connected sockets (`socketpair`) are not touched: they reach nobody who was not there before.

#![expect(
    clippy::cast_possible_truncation,
    reason = "libc's constants are wider than the fields of an instruction that they are for"
)]

use std::io;

use libc::sock_filter;

/// Puts the filter on the calling thread, for good. Needs no privilege, but `no_new_privs`.
#[expect(unsafe_code, reason = "there is no safe call that sets a filter of system calls")]
pub(crate) fn deny_unix_sockets() -> io::Result<()> {
    let program = libc::sock_fprog {
        len: PROGRAM.len().try_into().expect("the program has eleven instructions"),
        filter: PROGRAM.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the program, which lives as long as ours does, and does not write to it.
    let done =
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// In the kernel's own language; the targets of jumps are counted from the next instruction.
static PROGRAM: [sock_filter; 11] = [
    /* 0 */ load(ARCH),
    // Another architecture numbers its calls in another way: i386's `socketcall` on x86-64 would go by unseen.
    /* 1 */
    jump_if_equal(NATIVE, 1, 0),
    /* 2 */ answer(libc::SECCOMP_RET_KILL_PROCESS),
    /* 3 */ load(NUMBER),
    // So would the calls of x32, which have the architecture of x86-64, and this bit.
    /* 4 */
    jump_if_at_least(X32, 5, 0),
    // A ring makes sockets without a system call for each.
    /* 5 */
    jump_if_equal(libc::SYS_io_uring_setup as u32, 4, 0),
    /* 6 */ jump_if_equal(libc::SYS_socket as u32, 0, 2),
    /* 7 */ load(FAMILY),
    /* 8 */ jump_if_equal(libc::AF_UNIX as u32, 1, 0),
    /* 9 */ answer(libc::SECCOMP_RET_ALLOW),
    /* 10 */ answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
];

/// Offsets in `struct seccomp_data`. The family is an `int`, so that the lower half of the first argument is all of it.
const NUMBER: u32 = 0;
const ARCH: u32 = 4;
const FAMILY: u32 = 16;

/// `AUDIT_ARCH_X86_64` and `AUDIT_ARCH_AARCH64` of linux/audit.h: the ELF machine, 64 bits, little endian.
#[cfg(target_arch = "x86_64")]
const NATIVE: u32 = 0xc000_003e;
#[cfg(target_arch = "aarch64")]
const NATIVE: u32 = 0xc000_00b7;

/// `__X32_SYSCALL_BIT`; no call of another architecture has a number as high.
const X32: u32 = 0x4000_0000;

const fn load(offset: u32) -> sock_filter {
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

const fn answer(value: u32) -> sock_filter {
    sock_filter { code: (libc::BPF_RET | libc::BPF_K) as u16, jt: 0, jf: 0, k: value }
}
