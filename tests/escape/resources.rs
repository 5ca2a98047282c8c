//! Attempts to starve the host: each of them ends at the sandbox's own limit.

use std::fs::{self, File};
use std::io::{self, Write};

use crate::{AttemptOutcome, EscapeAttempt, HostFacts, call_result, error_name};

pub(crate) const ATTEMPTS: &[EscapeAttempt] = &[
    resource_attempt("filling /tmp", |_| fill_directory("/tmp", 64 << 20)),
    resource_attempt("filling /run", |_| fill_directory("/run", 8 << 20)),
    resource_attempt("filling /dev/shm", |_| fill_directory("/dev/shm", 64 << 20)),
    resource_attempt("a core dump", |_| check_limit(libc::RLIMIT_CORE, 0)),
    resource_attempt("as many files as it likes", |_| check_limit(libc::RLIMIT_NOFILE, 1024)),
    resource_attempt("a file without an end", |_| check_limit(libc::RLIMIT_FSIZE, 4 << 30)),
    resource_attempt("as many processes as it likes", fork_bomb),
];

const fn resource_attempt(
    what: &'static str,
    make: fn(&HostFacts) -> AttemptOutcome,
) -> EscapeAttempt {
    EscapeAttempt { area: "resources", what, make }
}

/// A directory that does not exist or is not writable counts as held.
fn fill_directory(directory: &str, most: u64) -> AttemptOutcome {
    let path = format!("{directory}/fill");
    let mut written = 0;
    let ended = File::create(&path).and_then(|mut file| {
        let chunk = vec![1; 1 << 20];
        while written <= most {
            written += u64::try_from(file.write(&chunk)?).expect("a length fits");
        }
        Ok(())
    });
    let _ = fs::remove_file(&path);
    match ended {
        Ok(()) => AttemptOutcome::Escaped(format!("{written} bytes and no end")),
        Err(error) => {
            AttemptOutcome::Held(format!("{} MiB, then: {}", written >> 20, error_name(&error)))
        }
    }
}

fn check_limit(resource: libc::__rlimit_resource_t, most: u64) -> AttemptOutcome {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit lives through the call.
    let asked = call_result(unsafe { libc::getrlimit(resource, &raw mut limit) });
    AttemptOutcome::expect(
        asked.is_ok() && limit.rlim_max <= most,
        format!("at most {}", limit.rlim_max),
    )
}

fn fork_bomb(facts: &HostFacts) -> AttemptOutcome {
    let Some(most) = facts.get("pids").and_then(|pids| pids.parse::<usize>().ok()) else {
        return AttemptOutcome::Escaped("`pids=` was not given, so this was not tried".to_owned());
    };
    let mut children = vec![];
    let ended = loop {
        match fork_child() {
            Ok(child) => children.push(child),
            Err(error) => break Some(error),
        }
        if children.len() > most {
            break None;
        }
    };
    for child in &children {
        // SAFETY: it is a child of ours.
        unsafe { libc::kill(*child, libc::SIGKILL) };
        // SAFETY: no status is asked for.
        unsafe { libc::waitpid(*child, std::ptr::null_mut(), 0) };
    }
    match ended {
        Some(error) => AttemptOutcome::Held(format!("within the limit: {}", error_name(&error))),
        None => AttemptOutcome::Escaped(format!("{} children", children.len())),
    }
}

fn fork_child() -> io::Result<i32> {
    // SAFETY: there is one thread; the child waits for its end and does nothing else.
    let child = call_result(unsafe { libc::fork() })?;
    if child == 0 {
        loop {
            // SAFETY: it waits.
            unsafe { libc::pause() };
        }
    }
    Ok(i32::try_from(child).expect("a pid is an int"))
}
