//! L3: Tests of the search for uncommitted files: it starts no program that the agent has configured.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;
use std::time::{Duration, SystemTime};

use cogni_gateway::relay::repo::extract_commands::create_stub_repository;

use super::setup::{RelayRun, RelaySetup, execute_command};

/// Git versions of different ages, if this machine has them. Only newer ones know where to read attributes from.
const GITS: [&str; 2] = ["/usr/bin/git", "/usr/local/bin/git"];

/// The workspace has filters, attributes, a file system monitor, aliases, and an index that makes all files look
/// modified.
#[test]
fn no_program_of_the_workspace_is_started_to_look_for_files() {
    for git in GITS.into_iter().filter(|git| Path::new(git).exists()) {
        let setup = RelaySetup::new();
        let run = setup.begin("hostile", "workspace");
        fs::create_dir(setup.path("canary")).unwrap();
        configure_repository(&setup, &run);
        make_racy(&run);
        assert_eq!(run_git(&setup, &run, git), "", "{git}: nothing has changed");
        // The new content has the same size, so git has to read the file.
        fs::write(run.workspace.path.join("README.md"), "# a PROJECT\n").unwrap();
        make_racy(&run);
        assert_eq!(run_git(&setup, &run, git), " M README.md\0", "{git}");
        run.workspace.write("new", "new");
        run.workspace.write("ignored/file", "ignored");
        run.workspace.write("nested/.git/config", "[core]\n\tfsmonitor = touch sung\n");
        assert_eq!(run_git(&setup, &run, git), " M README.md\0?? new\0", "{git}");
        let sung: Vec<_> = fs::read_dir(setup.path("canary")).unwrap().collect();
        assert!(sung.is_empty(), "{git}: something of the agent's was executed: {sung:?}");
    }
}

/// Files that are only in the index, and deleted files, count as uncommitted.
#[test]
fn a_file_that_is_only_in_the_index_is_uncommitted() {
    let setup = RelaySetup::new();
    let run = setup.begin("index", "workspace");
    assert_eq!(run_git(&setup, &run, GITS[0]), "");
    run.workspace.write("staged", "staged");
    run.workspace.git(["add", "staged"]);
    fs::remove_file(run.workspace.path.join("README.md")).unwrap();
    assert_eq!(run_git(&setup, &run, GITS[0]), " D README.md\0A  staged\0");
}

fn configure_repository(setup: &RelaySetup, run: &RelayRun) {
    let canary = |name: &str| format!("touch {}/{name}; cat", setup.path("canary").display());
    let mut config = String::new();
    for name in ["evil", "text", "lfs"] {
        for kind in ["clean", "smudge", "process"] {
            let _ = write!(config, "[filter \"{name}\"]\n\t{kind} = \"{}\"\n", canary(kind));
        }
        let _ = write!(config, "[filter \"{name}\"]\n\trequired = true\n");
        let _ = write!(
            config,
            "[diff \"{name}\"]\n\ttextconv = \"{0}\"\n\tcommand = \"{0}\"\n",
            canary("diff")
        );
    }
    let _ = write!(
        config,
        "[core]\n\tfsmonitor = \"{0}\"\n\tpager = \"{0}\"\n\teditor = \"{0}\"\n",
        canary("core")
    );
    let _ = write!(config, "[alias]\n\tstatus = \"!{}\"\n", canary("alias"));
    config += "[status]\n\tsubmoduleSummary = true\n[submodule]\n\trecurse = true\n";
    let git = run.workspace.path.join(".git");
    let path = git.join("config");
    fs::write(&path, fs::read_to_string(&path).unwrap() + &config).unwrap();
    fs::create_dir_all(git.join("info")).unwrap();
    fs::write(git.join("info/attributes"), "* filter=evil diff=evil\n").unwrap();
    fs::write(git.join("info/exclude"), "/ignored/\n/nested/\n/.gitattributes\n").unwrap();
    run.workspace.write(".gitattributes", "* filter=evil diff=evil\n*.c filter=lfs\n");
}

/// Makes the index look older than its files, so that git compares their contents.
fn make_racy(run: &RelayRun) {
    let old = SystemTime::now() - Duration::from_hours(1000);
    let index = run.workspace.path.join(".git/index");
    File::options().write(true).open(index).unwrap().set_modified(old).unwrap();
}

fn run_git(setup: &RelaySetup, run: &RelayRun, git: &str) -> String {
    let own = setup.path("own.git");
    if !own.exists() {
        create_stub_repository(&own, run.state.start).unwrap();
    }
    let mut command = setup.commands(run).uncommitted;
    git.clone_into(&mut command.argv[0]);
    let (output, code) = execute_command(&command);
    assert_eq!(code, 0, "{git}");
    String::from_utf8(output).unwrap()
}
