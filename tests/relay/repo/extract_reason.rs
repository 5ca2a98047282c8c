//! L3: Tests of the reason that git gives in the sandbox if it cannot take the work out.

use std::fs;
use std::process::Command;

use super::setup::RelaySetup;

/// An object of the agent's commit is missing. Git names the object, and no hint hides the name.
#[test]
fn the_reason_of_a_failure_comes_without_hints() {
    let setup = RelaySetup::new();
    let run = setup.begin("lost", "workspace");
    run.workspace.write("lost.txt", "lost\n");
    run.workspace.commit("Lost");
    let blob = run.workspace.git(["rev-parse", "HEAD:lost.txt"]);
    let (directory, file) = blob.split_at(2);
    fs::remove_file(run.workspace.path.join(".git/objects").join(directory).join(file)).unwrap();
    let command = setup.commands(&run).bundle;
    let output = Command::new(&command.argv[0])
        .args(&command.argv[1..])
        .env_clear()
        .envs(command.env.iter().map(|(name, value)| (name, value)))
        .current_dir("/")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.contains(&blob) && !stderr.contains("hint:"), "{stderr}");
}
