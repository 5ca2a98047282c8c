//! L6: Tests of pushes: the remote's behaviour, and the allowed remotes.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use cogni_gateway::base::secret::SecretString;
use cogni_gateway::relay::repo::mirror::FetchLimits;
use cogni_gateway::relay::repo::{
    BranchKey, BranchLease, CommitNote, PushOutcome, RepoError, RepoMirror,
};

use super::setup::{RelayRun, RelaySetup};
use crate::support::git_server::GitServer;
use crate::support::repository::TestRepository;

const TOKEN: &str = "ghs_0123456789abcdefghijklmnopqrstuvwxyz";

/// Sets up a remote behind HTTP that requires the token.
fn served_setup() -> (RelaySetup, GitServer) {
    let directory = tempfile::tempdir().unwrap();
    let remote = TestRepository::seeded(&directory.path().join("forge/o/remote.git"));
    let server = GitServer::start(&directory.path().join("forge"), TOKEN);
    let url = server.url("o/remote.git");
    (RelaySetup::at(directory, remote, &url), server)
}

fn take_lease(mirror: &RepoMirror, key: &str) -> BranchLease {
    mirror.lease_branch(&BranchKey::parse(key).unwrap()).unwrap()
}

fn begin_run(setup: &RelaySetup, token: &SecretString, name: &str) -> RelayRun {
    let lease = take_lease(&setup.mirror, "over-http");
    let state = setup.mirror.ensure_branch(&lease, None, Some(token)).unwrap();
    setup.begin_with(lease, state, name)
}

fn push_work(
    setup: &RelaySetup,
    run: &RelayRun,
    token: &SecretString,
) -> Result<PushOutcome, RepoError> {
    let announced = setup.extract(run).unwrap().unwrap();
    setup.judge(run, announced)?.into_approved().unwrap().push_branch(Some(token))
}

/// L6: A server that lists refs without end to a push is left at the memory that the quarantine's git has, and the error
/// says so.
#[test]
fn a_push_leaves_a_list_of_refs_without_end_early() {
    let (mut setup, server) = served_setup();
    setup.config.quarantine.memory_bytes = 256 << 20;
    let token = SecretString::new(TOKEN);
    let run = begin_run(&setup, &token, "one");
    run.workspace.write("more.txt", "more\n");
    run.workspace.commit("More");
    server.list_refs_without_end();
    let error = push_work(&setup, &run, &token).unwrap_err();
    assert!(matches!(error, RepoError::PushLimitExceeded { .. }), "{error}");
    assert!(error.to_string().contains("raise `quarantine.memory_bytes`"), "{error}");
    assert!(server.listed_bytes() < 256 << 20, "{} bytes: {error}", server.listed_bytes());
}

/// L6: The same holds for a push of notes.
#[test]
fn a_push_of_notes_leaves_a_list_of_refs_without_end_early() {
    let (setup, server) = served_setup();
    let limits = FetchLimits { memory_bytes: 256 << 20, ..FetchLimits::default() };
    let mirror = setup.mirror.clone().with_limits(limits);
    let token = SecretString::new(TOKEN);
    let lease = take_lease(&mirror, "over-http");
    let state = mirror.ensure_branch(&lease, None, Some(&token)).unwrap();
    let (head, committer) = (state.start, "Relay <relay@example.com>");
    server.list_refs_without_end();
    let note = CommitNote { branch: &state.branch, head, text: "proved", committer };
    let error = mirror.put_note(note, Some(&token)).unwrap_err();
    assert!(matches!(error, RepoError::NotesTooLarge { .. }), "{error}");
    assert!(server.listed_bytes() < 256 << 20, "{} bytes: {error}", server.listed_bytes());
}

/// L6: Fetch and push use a token, which is in no file and in no argument.
#[test]
fn work_is_pushed_with_a_token_that_is_written_nowhere() {
    let (setup, server) = served_setup();
    let token = SecretString::new(TOKEN);
    let run = begin_run(&setup, &token, "one");
    run.workspace.write("more.txt", "more\n");
    run.workspace.commit("More");
    let pushed = push_work(&setup, &run, &token).unwrap();
    assert_eq!(setup.tip("sandbox/over-http"), pushed.tip.to_string());
    assert!(server.seen().iter().any(|line| line == "POST /o/remote.git/git-receive-pack 200"));
    let encoded = "eC1hY2Nlc3MtdG9rZW46Z2hz";
    let found = TestRepository::at(setup.directory.path());
    for words in [TOKEN, encoded] {
        let grep = found.try_git(["grep", "--no-index", "-rlF", words, "."], b"");
        assert_eq!(String::from_utf8_lossy(&grep.stdout), "", "{words} is in a file");
    }
}

/// L6: After a lost answer, the relay looks at the remote and pushes again if necessary.
#[test]
fn a_lost_answer_is_no_lost_push() {
    let (setup, server) = served_setup();
    let token = SecretString::new(TOKEN);
    let run = begin_run(&setup, &token, "one");
    run.workspace.write("more.txt", "more\n");
    run.workspace.commit("More");
    server.lose_an_answer();
    let lost = push_work(&setup, &run, &token).unwrap();
    let again = push_work(&setup, &run, &token).unwrap();
    assert!(lost.was_there && again.was_there);
    assert_eq!((lost.tip, setup.tip("sandbox/over-http")), (again.tip, again.tip.to_string()));
    let pushes = |line: &&String| line.starts_with("POST") && line.contains("receive-pack");
    assert!(server.seen().iter().filter(pushes).count() >= 1);
}

/// L6: An invalid or revoked token is distinguished from an unreachable remote.
#[test]
fn a_bad_token_is_denied_and_never_shown() {
    let (setup, server) = served_setup();
    let token = SecretString::new(TOKEN);
    let run = begin_run(&setup, &token, "one");
    run.workspace.write("more.txt", "more\n");
    run.workspace.commit("More");
    server.accept("another");
    let denied = push_work(&setup, &run, &token).unwrap_err();
    assert!(matches!(denied, RepoError::Unauthorized { .. }), "{denied}");
    let message = format!("{denied} {denied:?}");
    assert!(!message.contains("0123456789abc") && !message.contains("eC1hY2Nlc3M"), "{message}");
    drop(run);
    let lease = take_lease(&setup.mirror, "over-http");
    let error = setup.mirror.ensure_branch(&lease, None, Some(&token)).unwrap_err();
    assert!(matches!(error, RepoError::Unauthorized { .. }), "{error}");
    drop(server);
    let gone = setup.mirror.ensure_branch(&lease, None, Some(&token)).unwrap_err();
    assert!(matches!(gone, RepoError::Unreachable { .. }), "{gone}");
}

/// L6: Another person's push is never overwritten, and a branch that a person deleted is not created again.
#[test]
fn a_branch_that_was_moved_is_not_touched() {
    let setup = RelaySetup::new();
    let work = |run: &RelayRun| {
        run.workspace.write("more.txt", "more\n");
        run.workspace.commit("More");
    };
    // The branch was created after the relay looked.
    let run = setup.begin("moved", "made");
    work(&run);
    let main = setup.tip("main");
    setup.remote.git(["branch", "sandbox/moved", "main"]);
    let error = setup.deliver(&run).unwrap_err();
    assert!(matches!(error, RepoError::BranchMoved { found: Some(_), .. }), "{error}");
    assert_eq!(setup.tip("sandbox/moved"), main);
    drop(run);
    // The branch was moved by force.
    let run = setup.begin("moved", "forced");
    work(&run);
    let other = setup.remote.git(["commit-tree", "-m", "Other", "main^{tree}"]);
    setup.remote.git(["update-ref", "refs/heads/sandbox/moved", &other]);
    let error = setup.deliver(&run).unwrap_err();
    insta::with_settings!({filters => vec![("[0-9a-f]{40}", "[name]")]}, {
        insta::assert_snapshot!(error, @"`sandbox/moved` is not where the run began any more; it is at [name]");
    });
    assert_eq!(setup.tip("sandbox/moved"), other);
    drop(run);
    // The branch was deleted.
    let run = setup.begin("moved", "deleted");
    work(&run);
    setup.remote.git(["branch", "-D", "sandbox/moved"]);
    let error = setup.deliver(&run).unwrap_err();
    insta::assert_snapshot!(error, @"`sandbox/moved` is not where the run began any more; it is gone");
    assert_eq!(setup.tip("sandbox/moved"), "");
}

/// L6: The remote's own rules hold, and the error repeats the remote's reason.
#[test]
fn a_protected_branch_is_declined_with_the_remotes_reason() {
    let setup = RelaySetup::new();
    let hook = setup.remote.path.join("hooks/update");
    fs::write(&hook, "#!/bin/sh\necho \"$1 is protected\" >&2\nexit 1\n").unwrap();
    fs::set_permissions(hook, PermissionsExt::from_mode(0o755)).unwrap();
    let run = setup.begin("protected", "one");
    run.workspace.write("more.txt", "more\n");
    run.workspace.commit("More");
    insta::assert_snapshot!(
        setup.deliver(&run).unwrap_err(),
        @"the remote declines the update: [remote rejected] (hook declined): refs/heads/sandbox/protected is protected error: hook declined to update refs/heads/sandbox/protected"
    );
}

/// L6: The work is never pushed to its base branch.
#[test]
fn the_default_branch_is_never_the_branch() {
    let setup = RelaySetup::new();
    setup.remote.git(["branch", "-m", "main", "sandbox/trunk"]);
    let trunk = take_lease(&setup.mirror, "trunk");
    for base in [None, Some("sandbox/trunk")] {
        let error = setup.mirror.ensure_branch(&trunk, base, None).unwrap_err();
        assert!(matches!(error, RepoError::DefaultBranch { .. }), "{error}");
    }
}

/// L2: A repository of this machine that does not exist is named as that, and not as a question of access.
#[test]
fn a_missing_local_repository_is_named() {
    let setup = RelaySetup::new();
    let lease = take_lease(&setup.mirror, "key");
    let error = || {
        let error = setup.mirror.ensure_branch(&lease, None, None).unwrap_err().to_string();
        error.replace(setup.remote.path.to_str().unwrap(), "PATH")
    };
    fs::remove_dir_all(&setup.remote.path).unwrap();
    insta::assert_snapshot!(error(), @"`PATH` is no repository: the path does not exist on this machine; give the path of a git repository that the relay may read");
    fs::create_dir(&setup.remote.path).unwrap();
    insta::assert_snapshot!(error(), @"`PATH` is no repository: git cannot read a repository there; give the path of a git repository that the relay may read");
}

/// L2: A missing base branch is an error, and so is an invalid name.
#[test]
fn a_missing_base_is_an_error() {
    let setup = RelaySetup::new();
    let lease = take_lease(&setup.mirror, "key");
    for base in ["nowhere", "main:refs/heads/x", "--upload-pack=evil", "*", ""] {
        let error = setup.mirror.ensure_branch(&lease, Some(base), None).unwrap_err();
        assert!(matches!(error, RepoError::UnknownBase { .. }), "{base}: {error}");
    }
    setup.remote.git(["branch", "release/1", "main"]);
    let state = setup.mirror.ensure_branch(&lease, Some("release/1"), None).unwrap();
    assert_eq!((state.base.as_str(), state.exists), ("release/1", false));
    assert_eq!(setup.mirror.ensure_branch(&lease, Some("release/1"), None).unwrap(), state);
}
