//! System calls that an agent does not need, each with arguments that would do no harm if the call were allowed.

use std::arch::asm;
use std::fs;
use std::io;

use crate::{AttemptOutcome, EscapeAttempt, HostFacts, call_result};

pub(crate) const ATTEMPTS: &[EscapeAttempt] = &[
    kernel_attempt("capabilities", |_| check_capabilities()),
    kernel_attempt("rights by a set-user-id program", |_| {
        check_status("NoNewPrivs", |value| value == "1")
    }),
    kernel_attempt("a life without a filter", |_| check_status("Seccomp", |value| value == "2")),
    kernel_attempt("being root", |_| AttemptOutcome::of(make_call(libc::SYS_setuid, 0))),
    kernel_attempt("a user namespace", |_| {
        AttemptOutcome::of(make_call(libc::SYS_unshare, libc::CLONE_NEWUSER.into()))
    }),
    kernel_attempt("a child in a user namespace", |_| {
        AttemptOutcome::of(
            make_call(libc::SYS_clone, (libc::CLONE_NEWUSER | libc::SIGCHLD).into())
                .inspect(|pid| end_child(*pid)),
        )
    }),
    kernel_attempt("any other namespace", |_| {
        AttemptOutcome::of(make_call(libc::SYS_unshare, libc::CLONE_NEWNS.into()))
    }),
    kernel_attempt("another process's namespace", |_| AttemptOutcome::of(enter_namespace())),
    kernel_attempt("the kernel's keyring", |_| {
        try_denied_calls(&[libc::SYS_keyctl, libc::SYS_add_key, libc::SYS_request_key])
    }),
    kernel_attempt("io_uring", |_| {
        try_denied_calls(&[
            libc::SYS_io_uring_setup,
            libc::SYS_io_uring_enter,
            libc::SYS_io_uring_register,
        ])
    }),
    kernel_attempt("the machine's asynchronous input and output", |_| {
        try_denied_calls(&[libc::SYS_io_setup, libc::SYS_io_submit])
    }),
    kernel_attempt("BPF", |_| try_denied_calls(&[libc::SYS_bpf])),
    kernel_attempt("filters of its own, for which the machine has one pool", |_| {
        AttemptOutcome::all([
            ("prctl".to_owned(), AttemptOutcome::of(install_filter())),
            ("seccomp".to_owned(), try_denied_calls(&[libc::SYS_seccomp])),
        ])
    }),
    kernel_attempt("performance counters", |_| try_denied_calls(&[libc::SYS_perf_event_open])),
    kernel_attempt("page faults handled by itself", |_| try_denied_calls(&[libc::SYS_userfaultfd])),
    kernel_attempt("modules", |_| {
        try_denied_calls(&[libc::SYS_init_module, libc::SYS_finit_module, libc::SYS_delete_module])
    }),
    kernel_attempt("another kernel", |_| {
        try_denied_calls(&[libc::SYS_kexec_load, libc::SYS_kexec_file_load, libc::SYS_reboot])
    }),
    kernel_attempt("the kernel's log", |_| try_denied_calls(&[libc::SYS_syslog])),
    kernel_attempt("the clock", |_| {
        try_denied_calls(&[libc::SYS_settimeofday, libc::SYS_clock_settime, libc::SYS_adjtimex])
    }),
    kernel_attempt("swap and accounting", |_| {
        try_denied_calls(&[libc::SYS_swapon, libc::SYS_swapoff, libc::SYS_acct, libc::SYS_quotactl])
    }),
    kernel_attempt("watching the whole file system", |_| {
        try_denied_calls(&[libc::SYS_fanotify_init])
    }),
    kernel_attempt("ports of the hardware", |_| {
        try_denied_calls(&[libc::SYS_ioperm, libc::SYS_iopl])
    }),
    kernel_attempt("segments for 16 bits", |_| try_denied_calls(&[libc::SYS_modify_ldt])),
    kernel_attempt("calls of later kernels", |_| try_denied_calls(&[600, 1000])),
    kernel_attempt("calls by the numbers of x32", |_| call_x32()),
    kernel_attempt("calls by the numbers of i386", |_| call_i386()),
];

const fn kernel_attempt(
    what: &'static str,
    make: fn(&HostFacts) -> AttemptOutcome,
) -> EscapeAttempt {
    EscapeAttempt { area: "kernel", what, make }
}

/// Each call must be unknown or not permitted. An error about bad arguments would mean that the kernel examined the
/// call.
fn try_denied_calls(numbers: &[libc::c_long]) -> AttemptOutcome {
    AttemptOutcome::all(numbers.iter().map(|number| {
        let outcome = match make_call(*number, 0) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOSYS | libc::EPERM)) => {
                AttemptOutcome::of(Err::<(), _>(error))
            }
            Err(error) => AttemptOutcome::Escaped(format!("the kernel looked at it: {error}")),
            Ok(_) => AttemptOutcome::Escaped("it worked".to_owned()),
        };
        (format!("call {number}"), outcome)
    }))
}

fn make_call(number: libc::c_long, first: libc::c_long) -> io::Result<i64> {
    // SAFETY: no pointer is passed; the kernel checks the numbers.
    call_result(unsafe { libc::syscall(number, first, 0, 0, 0, 0) })
}

/// Installs a filter that allows everything.
fn install_filter() -> io::Result<i64> {
    let code = u16::try_from(libc::BPF_RET | libc::BPF_K).expect("a code has 16 bits");
    let mut allow = libc::sock_filter { code, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW };
    let program = libc::sock_fprog { len: 1, filter: &raw mut allow };
    // SAFETY: the program lives through the call.
    call_result(unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program)
    })
}

/// Ends the child if the call did make one: the child must not continue as a second attacker.
fn end_child(pid: i64) {
    if pid == 0 {
        // SAFETY: the child ends here, and runs nothing on its way out.
        unsafe { libc::_exit(0) };
    }
}

/// The five capability sets are empty, including the bounding set.
fn check_capabilities() -> AttemptOutcome {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let sets: Vec<_> = status.lines().filter(|line| line.starts_with("Cap")).collect();
    let is_empty = |line: &&str| line.ends_with("\t0000000000000000");
    AttemptOutcome::expect(sets.len() == 5 && sets.iter().all(is_empty), "five empty sets")
}

fn check_status(field: &str, is_right: fn(&str) -> bool) -> AttemptOutcome {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let value = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t"));
    let value = value.unwrap_or("nothing");
    AttemptOutcome::expect(is_right(value), format!("{field} is {value}"))
}

fn enter_namespace() -> io::Result<i64> {
    use std::os::fd::AsRawFd;
    let namespace = fs::File::open("/proc/self/ns/net")?;
    make_call(libc::SYS_setns, namespace.as_raw_fd().into())
}

fn call_x32() -> AttemptOutcome {
    // SAFETY: no pointer is passed.
    in_child(|| unsafe { libc::syscall(X32 | libc::SYS_getpid) })
}

fn call_i386() -> AttemptOutcome {
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
