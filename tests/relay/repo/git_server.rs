//! Tests of the test suite's own git server: it requires the token.

use crate::support::git_server::GitServer;
use crate::support::repository::TestRepository;

#[test]
fn the_server_requires_the_token() {
    let directory = tempfile::tempdir().unwrap();
    TestRepository::seeded(&directory.path().join("project.git"));
    let server = GitServer::start(directory.path(), "s3cret");
    let client = TestRepository::with_files(&directory.path().join("client"));
    let url = server.url("project.git");
    let refused = client.try_git(["-c", "credential.helper=", "ls-remote", &url], b"");
    assert!(!refused.status.success());
    let url = url.replace("http://", "http://x-access-token:s3cret@");
    assert!(client.git(["ls-remote", &url]).contains("refs/heads/main"));
    client.git(["pull", "-q", &url, "main"]);
    client.write("more.txt", vec![b'x'; 3 << 20]);
    client.commit("More");
    client.git(["push", "-q", &url, "HEAD:refs/heads/sandbox/more"]);
    let seen = server.seen();
    assert!(seen.iter().any(|line| line.ends_with(" 401")), "{seen:?}");
    assert_eq!(seen.last().unwrap(), "POST /project.git/git-receive-pack 200");
}
