//! Attempts on other processes: the host's are invisible, and the sandbox's first process cannot be touched.

use std::fs;
use std::io;

use crate::{AttemptOutcome, EscapeAttempt, HostFacts, answered};

pub(crate) const ATTEMPTS: &[EscapeAttempt] = &[
    attempt("seeing the host's processes", |_| visible()),
    attempt("a signal to a process of the host", |facts| {
        match facts.get("host-pid").and_then(|pid| pid.parse().ok()) {
            Some(pid) => AttemptOutcome::of(signal(pid, 0)),
            None => AttemptOutcome::Escaped(
                "`host-pid=` was not given, so this was not tried".to_owned(),
            ),
        }
    }),
    attempt("killing the first process", |_| kill_first()),
    attempt("a signal that reaches the first process", |_| {
        landlocked(6, || AttemptOutcome::of(signal(1, 0)))
    }),
    attempt("tracing the first process", |_| AttemptOutcome::of(trace())),
    attempt("reading the first process' memory", |_| AttemptOutcome::of(read_memory())),
    attempt("a descriptor of the first process", |_| AttemptOutcome::of(descriptor())),
    attempt("more priority", |_| AttemptOutcome::of(priority())),
    attempt("being spared when memory is short", |_| {
        AttemptOutcome::of(fs::write("/proc/self/oom_score_adj", "-1000"))
    }),
    attempt("a file of its own in /proc", |_| {
        landlocked(2, || AttemptOutcome::of(fs::write("/proc/self/comm", "other")))
    }),
    attempt("more than its limits", |_| AttemptOutcome::of(raise())),
];

const fn attempt(what: &'static str, make: fn(&HostFacts) -> AttemptOutcome) -> EscapeAttempt {
    EscapeAttempt { area: "processes", what, make }
}

/// Runs an attempt that only Landlock of at least this version denies, if the kernel has it.
fn landlocked(since: i64, attempt: impl Fn() -> AttemptOutcome) -> AttemptOutcome {
    // SAFETY: asked for the version the kernel takes no pointer.
    let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
    if version >= since {
        attempt()
    } else {
        AttemptOutcome::Held("no such Landlock here".to_owned())
    }
}

/// Only the first process, this process and its parent are visible.
fn visible() -> AttemptOutcome {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_process = |name: &str| name.bytes().all(|byte| byte.is_ascii_digit());
    let count = entries.filter(|entry| is_process(&entry.file_name().to_string_lossy())).count();
    AttemptOutcome::expect(count <= 3, format!("{count} processes"))
}

fn signal(pid: i32, signal: i32) -> io::Result<i64> {
    // SAFETY: no pointer is passed.
    answered(unsafe { libc::kill(pid, signal) })
}

/// The kernel accepts the signal and drops it: a namespace's first process is not killed from inside.
fn kill_first() -> AttemptOutcome {
    let _ = signal(1, libc::SIGKILL);
    AttemptOutcome::expect(fs::exists("/proc/1/status").unwrap_or(false), "it lives on")
}

fn trace() -> io::Result<i64> {
    // SAFETY: attaching takes no pointers.
    answered(unsafe { libc::ptrace(libc::PTRACE_ATTACH, 1, 0, 0) })
}

fn read_memory() -> io::Result<i64> {
    let mut byte = 0_u8;
    let local = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let remote = libc::iovec { iov_base: std::ptr::without_provenance_mut(0x40_0000), iov_len: 1 };
    // SAFETY: the local vector is a byte of ours; the remote one is the kernel's to check.
    let read = unsafe { libc::process_vm_readv(1, &raw const local, 1, &raw const remote, 1, 0) };
    answered(i64::try_from(read).expect("a length fits"))
}

fn descriptor() -> io::Result<i64> {
    // SAFETY: no pointers are passed.
    let process = answered(unsafe { libc::syscall(libc::SYS_pidfd_open, 1, 0) })?;
    // SAFETY: as above.
    answered(unsafe { libc::syscall(libc::SYS_pidfd_getfd, process, 0, 0) })
}

fn priority() -> io::Result<i64> {
    // SAFETY: no pointer is passed.
    answered(unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, -10) })
}

fn raise() -> io::Result<i64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit lives through the call.
    answered(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) })?;
    limit.rlim_max += 1;
    // SAFETY: the limit lives through the call.
    answered(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) })
}
