//! R8: Tests of output that cannot be written, and of the form of errors.

use std::fs::File;
use std::io;
use std::process::{Command, Stdio};

use super::{BINARY, run_cogni};

/// A reader such as `head -0` ends before the command has written.
#[test]
fn a_reader_that_has_ended_is_no_error() {
    let (reader, writer) = io::pipe().unwrap();
    drop(reader);
    assert_eq!(list_agents(writer), (1, String::new()));
}

#[test]
fn a_full_disk_is_reported_and_is_not_wrong_use() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let (code, said) = list_agents(full);
    assert_eq!(code, 1);
    insta::assert_snapshot!(said, @"error: cannot write to standard output: No space left on device (os error 28)");
}

/// An error is printed once, with what would be correct.
#[test]
fn errors_are_short_and_say_what_to_do() {
    let place = tempfile::tempdir().unwrap();
    let file = place.path().join("file");
    File::create(&file).unwrap();
    let wrong = |arguments: &[&str]| {
        let (code, out, said) = run_cogni(arguments, &[]);
        assert_eq!(out, "", "{arguments:?}");
        let said = said.replace(place.path().to_str().unwrap(), "[dir]");
        format!("{code}: {said}")
    };
    let state = file.to_str().unwrap();
    insta::assert_snapshot!(wrong(&["grant", "list", "--state-dir", state]), @"2: error: no grants found: `[dir]/file/state.db` does not exist; see `--state-dir`, or make a grant with `cogni-gateway grant mint`");
    insta::assert_snapshot!(wrong(&["audit", "show", "/"]), @"2: error: audit log `/`: it is no regular file");
    // A pipe has no end, so the command must not wait for one.
    let pipe = place.path().join("pipe");
    rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RUSR).unwrap();
    let pipe = pipe.to_str().unwrap();
    insta::assert_snapshot!(wrong(&["audit", "show", pipe]), @"2: error: audit log `[dir]/pipe`: it is no regular file");
    insta::assert_snapshot!(wrong(&["audit", "verify", pipe]), @"2: error: cannot use audit log `[dir]/pipe`: it is no regular file");
    insta::assert_snapshot!(wrong(&["run", "--max-runtime", "soon", "--", "true"]), @"
    2: error: invalid value 'soon' for '--max-runtime <TIME>': give a time, such as 30s, 5m or 1h 30m

    For more information, try '--help'.
    ");
}

fn list_agents(out: impl Into<Stdio>) -> (i32, String) {
    let mut command = Command::new(BINARY);
    let done = command.args(["agents", "--all"]).env_clear().stdout(out).output().unwrap();
    (done.status.code().unwrap(), String::from_utf8(done.stderr).unwrap())
}
