//! Attempts on other processes: the host's are invisible, and the sandbox's first process cannot be touched.

use std::fs;
use std::io;

use crate::{AttemptOutcome, EscapeAttempt, HostFacts, call_result};

pub(crate) const ATTEMPTS: &[EscapeAttempt] = &[
    process_attempt("seeing the host's processes", |_| list_visible()),
    process_attempt("a signal to a process of the host", |facts| {
        match facts.get("host-pid").and_then(|pid| pid.parse().ok()) {
            Some(pid) => AttemptOutcome::of(send_signal(pid, 0)),
            None => AttemptOutcome::Escaped(
                "`host-pid=` was not given, so this was not tried".to_owned(),
            ),
        }
    }),
    process_attempt("killing the first process", |_| kill_first()),
    process_attempt("a signal that reaches the first process", |_| {
        try_with_landlock(6, || AttemptOutcome::of(send_signal(1, 0)))
    }),
    process_attempt("tracing the first process", |_| AttemptOutcome::of(trace_process())),
    process_attempt("reading the first process' memory", |_| AttemptOutcome::of(read_memory())),
    process_attempt("a descriptor of the first process", |_| AttemptOutcome::of(take_descriptor())),
    process_attempt("more priority", |_| AttemptOutcome::of(change_priority())),
    process_attempt("being spared when memory is short", |_| {
        AttemptOutcome::of(fs::write("/proc/self/oom_score_adj", "-1000"))
    }),
    process_attempt("a file of its own in /proc", |_| {
        try_with_landlock(2, || AttemptOutcome::of(fs::write("/proc/self/comm", "other")))
    }),
    process_attempt("more than its limits", |_| AttemptOutcome::of(raise_limit())),
];

const fn process_attempt(
    what: &'static str,
    make: fn(&HostFacts) -> AttemptOutcome,
) -> EscapeAttempt {
    EscapeAttempt { area: "processes", what, make }
}

/// Runs an attempt that only Landlock of at least this version denies, if the kernel has it.
fn try_with_landlock(since: i64, attempt: impl Fn() -> AttemptOutcome) -> AttemptOutcome {
    // SAFETY: asked for the version the kernel takes no pointer.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    if version >= since {
        attempt()
    } else {
        AttemptOutcome::Held("no such Landlock here".to_owned())
    }
}

/// Only the first process, this process and its parent are visible.
fn list_visible() -> AttemptOutcome {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let count = entries.filter(|entry| is_process(&entry.file_name().to_string_lossy())).count();
    AttemptOutcome::expect(count <= 3, format!("{count} processes"))
}

fn send_signal(pid: i32, signal: i32) -> io::Result<i64> {
    // SAFETY: no pointer is passed.
    call_result(unsafe { libc::kill(pid, signal) })
}

/// The kernel accepts the signal and drops it: a namespace's first process is not killed from inside.
fn kill_first() -> AttemptOutcome {
    let _ = send_signal(1, libc::SIGKILL);
    AttemptOutcome::expect(fs::exists("/proc/1/status").unwrap_or(false), "it lives on")
}

fn trace_process() -> io::Result<i64> {
    // SAFETY: attaching takes no pointers.
    call_result(unsafe { libc::ptrace(libc::PTRACE_ATTACH, 1, 0, 0) })
}

fn read_memory() -> io::Result<i64> {
    let mut byte = 0_u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(0x40_0000), iov_len: 1 };
    // SAFETY: the local vector is a byte of ours; the remote one is the kernel's to check.
    let read = unsafe { libc::process_vm_readv(1, &raw const local, 1, &raw const remote, 1, 0) };
    call_result(i64::try_from(read).expect("a length fits"))
}

fn take_descriptor() -> io::Result<i64> {
    // SAFETY: no pointers are passed.
    let process = call_result(unsafe { libc::syscall(libc::SYS_pidfd_open, 1, 0) })?;
    // SAFETY: as above.
    call_result(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, 0, 0) })
}

/// Asks for one step more than the priority that the process has from its runner.
fn change_priority() -> io::Result<i64> {
    // SAFETY: no pointer is passed.
    let nice = unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
    // SAFETY: no pointer is passed.
    call_result(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, nice - 1) })
}

fn raise_limit() -> io::Result<i64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit lives through the call.
    call_result(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_max += 1;
    // SAFETY: the limit lives through the call.
    call_result(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })
}
