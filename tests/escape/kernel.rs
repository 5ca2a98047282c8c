//! System calls that an agent does not need, each with arguments that would do no harm if the call were allowed.

use std::arch::asm;
use std::fs;
use std::io;

use crate::{AttemptOutcome, EscapeAttempt, HostFacts, answered};

pub(crate) const ATTEMPTS: &[EscapeAttempt] = &[
    attempt("capabilities", |_| capabilities()),
    attempt("rights by a set-user-id program", |_| status("NoNewPrivs", |value| value == "1")),
    attempt("a life without a filter", |_| status("Seccomp", |value| value == "2")),
    attempt("being root", |_| AttemptOutcome::of(call(libc::SYS_setuid, 0))),
    attempt("a user namespace", |_| {
        AttemptOutcome::of(call(libc::SYS_unshare, libc::CLONE_NEWUSER.into()))
    }),
    attempt("a child in a user namespace", |_| {
        AttemptOutcome::of(
            call(libc::SYS_clone, (libc::CLONE_NEWUSER | libc::SIGCHLD).into())
                .inspect(|pid| end_child(*pid)),
        )
    }),
    attempt("any other namespace", |_| {
        AttemptOutcome::of(call(libc::SYS_unshare, libc::CLONE_NEWNS.into()))
    }),
    attempt("another process's namespace", |_| AttemptOutcome::of(enter())),
    attempt("the kernel's keyring", |_| {
        denied(&[libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key])
    }),
    attempt("io_uring", |_| {
        denied(&[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register])
    }),
    attempt("the machine's asynchronous input and output", |_| {
        denied(&[libc::SYS_io_setup, libc::SYS_io_submit])
    }),
    attempt("BPF", |_| denied(&[libc::SYS_bpf])),
    attempt("filters of its own, for which the machine has one pool", |_| {
        AttemptOutcome::all([
            ("prctl".to_owned(), AttemptOutcome::of(filter())),
            ("seccomp".to_owned(), denied(&[libc::SYS_seccomp])),
        ])
    }),
    attempt("performance counters", |_| denied(&[libc::SYS_perf_event_open])),
    attempt("page faults handled by itself", |_| denied(&[libc::SYS_userfaultfd])),
    attempt("modules", |_| {
        denied(&[libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module])
    }),
    attempt("another kernel", |_| {
        denied(&[libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_reboot])
    }),
    attempt("the kernel's log", |_| denied(&[libc::SYS_syslog])),
    attempt("the clock", |_| {
        denied(&[libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_adjtimex])
    }),
    attempt("swap and accounting", |_| {
        denied(&[libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct, libc::SYS_quotactl])
    }),
    attempt("watching the whole file system", |_| denied(&[libc::SYS_fanotify_init])),
    attempt("ports of the hardware", |_| denied(&[libc::SYS_ioperm, libc::SYS_iopl])),
    attempt("segments for 16 bits", |_| denied(&[libc::SYS_modify_ldt])),
    attempt("calls of later kernels", |_| denied(&[600, 1000])),
    attempt("calls by the numbers of x32", |_| x32()),
    attempt("calls by the numbers of i386", |_| i386()),
];

const fn attempt(what: &'static str, make: fn(&HostFacts) -> AttemptOutcome) -> EscapeAttempt {
    EscapeAttempt { area: "kernel", what, make }
}

/// Each call must be unknown or not permitted. An error about bad arguments would mean that the kernel examined the
/// call.
fn denied(numbers: &[libc::c_long]) -> AttemptOutcome {
    AttemptOutcome::all(numbers.iter().map(|number| {
        let outcome = match call(*number, 0) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                AttemptOutcome::of(Err::<(), _>(error))
            }
            Err(error) => AttemptOutcome::Escaped(format!("the kernel looked at it: {error}")),
            Ok(_) => AttemptOutcome::Escaped("it worked".to_owned()),
        };
        (format!("call {number}"), outcome)
    }))
}

fn call(number: libc::c_long, first: libc::c_long) -> io::Result<i64> {
    // SAFETY: no pointer is passed; the kernel checks the numbers.
    answered(unsafe { libc::syscall(number, first, 0, 0, 0, 0) })
}

/// Installs a filter that allows everything.
fn filter() -> io::Result<i64> {
    let code = u16::try_from(libc::BPF_RET | libc::BPF_K).expect("a code has 16 bits");
    let mut allow = libc::sock_filter { code, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
    let program = libc::sock_fprog { len: 1, filter: &raw mut allow };
    // SAFETY: the program lives through the call.
    answered(unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    })
}

/// If the call did make a child, the child must not continue as a second attacker.
fn end_child(pid: i64) {
    if pid == 0 {
        // SAFETY: the child ends here, and runs nothing on its way out.
        unsafe { libc::_exit(0) };
    }
}

/// All five capability sets are empty, including the bounding set.
fn capabilities() -> AttemptOutcome {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let sets: Vec<_> = status.lines().filter(|line| line.starts_with("Cap")).collect();
    let is_empty = |line: &&str| line.ends_with("\t0000000000000000");
    AttemptOutcome::expect(sets.len() == 5 && sets.iter().all(is_empty), "five empty sets")
}

fn status(field: &str, is_right: fn(&str) -> bool) -> AttemptOutcome {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t"));
    let value = value.unwrap_or("nothing");
    AttemptOutcome::expect(is_right(value), format!("{field} is {value}"))
}

fn enter() -> io::Result<i64> {
    use std::os::fd::AsRawFd;
    let namespace = fs::File::open("/proc/self/ns/net")?;
    call(libc::SYS_setns, namespace.as_raw_fd().into())
}

fn x32() -> AttemptOutcome {
    // SAFETY: no pointer is passed.
    in_child(|| unsafe { libc::syscall(X32 | libc::SYS_getpid) })
}

fn i386() -> AttemptOutcome {
    in_child(|| {
        let mut answer: i64 = 20; // `getpid` of i386
        // SAFETY: the call reads and writes no memory.
        unsafe { asm!("int 0x80", inout("rax") answer) };
        answer
    })
}

/// A filter may kill a process that asks for its id in this way.
fn in_child(get_pid: fn() -> i64) -> AttemptOutcome {
    // SAFETY: there is one thread; the child makes one call and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let got_through = get_pid() > 0;
        // SAFETY: the child ends here.
        unsafe { libc::_exit(got_through.into()) };
    }
    let mut status = 0;
    // SAFETY: `status` lives through the call.
    unsafe { libc::waitpid(child, &raw mut status, 0) };
    let got_through = libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 1;
    AttemptOutcome::expect(
        !got_through,
        if libc::WIFSIGNALED(status) { "killed" } else { "an error" },
    )
}

/// `__X32_SYSCALL_BIT` of asm/unistd.h.
const X32: libc::c_long = 0x4000_0000;
