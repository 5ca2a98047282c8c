//! An accepted commit is the same commit for git, and the rewritten commit is accepted again.
#![cfg_attr(fuzzing, no_main)]

use std::collections::HashMap;
use std::io::Write;
use std::process::{Command, Stdio};

use cogni_gateway::relay::repo::ObjectId;
use cogni_gateway::relay::repo::quarantine::commit::ParsedCommit;
use cogni_gateway::relay::repo::quarantine::tree;

cogni_gateway_fuzz::fuzz_target!(|data: &[u8]| {
    if let Ok(commit) = ParsedCommit::parse(ObjectId::NONE, data) {
        let head = git_reads(data);
        assert_eq!((commit.tree, commit.parents.clone()), head);
        // Git before 2.40 also refuses a name that stands for a tree and for a parent. No object is both.
        assert!(commit.parents.contains(&commit.tree) || git_accepts("commit", data));
        let made = commit.rewritten(&HashMap::new(), "R <r@example.com>", "Sandbox-Run: x\n");
        let again =
            ParsedCommit::parse(ObjectId::NONE, &made).expect("what is made anew has the one form");
        assert_eq!((again.tree, &again.parents), (commit.tree, &commit.parents));
        assert_eq!((again.author, again.encoding), (commit.author, None));
        assert!(again.message.starts_with(commit.message.trim_ascii_end()));
    }
    // Git reads trees itself; the check before that may only accept or refuse.
    let _ = tree::check_tree(data);
});

/// Returns the tree and the parents, as git's `parse_commit_buffer` reads them.
fn git_reads(data: &[u8]) -> (ObjectId, Vec<ObjectId>) {
    let tree = ObjectId::parse(&data[5..45]).expect("it begins with a tree");
    let (mut rest, mut parents) = (&data[46..], vec![]);
    while let Some(parent) = rest.strip_prefix(b"parent ") {
        parents.push(ObjectId::parse(&parent[..40]).expect("a parent has a name"));
        rest = &parent[41..];
    }
    (tree, parents)
}

/// Returns whether git's own check accepts the form of an object.
fn git_accepts(kind: &str, content: &[u8]) -> bool {
    let mut git = Command::new("git")
        .args(["hash-object", "--stdin", "-t", kind])
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("git is installed");
    git.stdin.take().expect("it is a pipe").write_all(content).expect("git reads all of it");
    git.wait().expect("git ends").success()
}
