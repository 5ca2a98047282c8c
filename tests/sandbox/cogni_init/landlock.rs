//! R3: Tests of the directories that the agent may write to under Landlock, and of a kernel without Landlock.

use std::fs;
use std::process::Command;

use super::{InitEnd, InitFixture, PROGRAM};
use crate::support::run_command::landlock_version;

/// R3: The agent, as any user, writes only where it may, and can do everything there that it could before.
#[test]
fn the_agent_writes_where_it_may_and_nowhere_else() {
    let sandbox = InitFixture::new();
    fs::create_dir(sandbox.path("own")).unwrap();
    fs::write(sandbox.path("other"), "as it was").unwrap();
    let script = "
        cd $FOLDER/own || exit 3
        mkdir -p one two && echo x > one/x && ln -s x one/link && mv one/x two/x && ln two/x x && truncate -s 9 x && rm -r one || echo 'not its own'
        echo x > /dev/null && cat ../other >/dev/null && ls / >/dev/null || echo 'not as before'
        echo x 2>/dev/null > ../other && echo 'wrote over another'
        echo x 2>/dev/null > ../new && echo 'made another'
        mv x ../moved 2>/dev/null && echo 'moved out'
        mv ../other x 2>/dev/null && echo 'moved in'
        mknod null c 1 3 2>/dev/null && echo 'made a device'
        echo x 2>/dev/null > /proc/self/comm && echo 'named itself'
        kill -0 $PPID 2>/dev/null && echo 'could signal its first process'
        true
    ";
    let directory = format!("FOLDER={}", sandbox.path(""));
    let own = sandbox.path("own");
    let ended =
        sandbox.script(&["--env", &directory, "--write", &own, "--write", "/nowhere"], script);
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    match landlock_version() {
        6.. => assert_eq!(ended.stdout, ""),
        2.. => assert_eq!(ended.stdout, "could signal its first process\n"),
        // Landlock is not required here; `doctor` reports that it is missing.
        _ => assert!(ended.stdout.contains("made another\n"), "{}", ended.stdout),
    }
}

/// R3: A writable path may be a file as well as a directory.
#[test]
fn a_writable_path_may_be_a_file() {
    let sandbox = InitFixture::new();
    let file = sandbox.path("file");
    fs::write(&file, "").unwrap();
    let ended = sandbox.script(&["--write", &file], &format!("echo new > {file}"));
    assert_eq!((ended.code, fs::read_to_string(file).unwrap().as_str()), (Some(0), "new\n"));
}

/// R3: A kernel without Landlock does not stop the agent.
#[test]
fn a_kernel_without_landlock_is_no_reason_to_stop() {
    let sandbox = InitFixture::new();
    let command = sandbox.command(&["--write", "/nowhere"], &["touch", &sandbox.path("made")]);
    let arguments = command.get_args().map(|argument| argument.to_str().unwrap());
    let mut without = Command::new("perl");
    without.args(["-e", WITHOUT, PROGRAM]).args(arguments);
    let ended = InitEnd::of(&mut without);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""));
    assert!(fs::exists(sandbox.path("made")).unwrap());
}

/// Executes its arguments on a simulated kernel without `landlock_create_ruleset`, whose number is the same on every
/// architecture.
const WITHOUT: &str = r#"
my $filter = pack("SCCL" x 4, 0x20, 0, 0, 0, 0x15, 0, 1, 444, 0x06, 0, 0, 0x00050026, 0x06, 0, 0, 0x7fff0000);
my $prctl = `uname -m` eq "x86_64\n" ? 157 : 167;
syscall($prctl, 38, 1, 0, 0, 0) == 0 or die "no_new_privs: $!";
syscall($prctl, 22, 2, pack("Sx6P", 4, $filter)) == 0 or die "filter: $!";
exec @ARGV or die;
"#;
