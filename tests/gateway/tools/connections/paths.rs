//! T6: Tests of paths and rules: what a rule allows is what the server reads.

use cogni_gateway::tools::connection::path_rule::ConnectRule;
use cogni_gateway::tools::connection::request_path::RequestPath;
use proptest::prelude::*;

use super::server::SecureServer;
use super::{SECRET, SecretFile, code_of, start_app};

/// Paths that a server could read as another path.
const AMBIGUOUS: &[&str] = &[
    "//",
    "/a//b",
    "/.",
    "/..",
    "/a/./b",
    "/a/../b",
    "/a/..",
    "/a/%2e%2e/b",
    "/a/%2E./b",
    "/a/.%2e/b",
    "/a/%252e%252e/b",
    "/a/%2f../b",
    "/a%2f..%2fb",
    "/a%2f%2fb",
    "/%2f",
    "/a%5cb",
    "/a\\..\\b",
    "/a;b=c/d",
    "/a%3bb",
    "/a%00",
    "/a%0d%0ax: y",
    "/a%7f",
    "/a%3fb",
    "/a%23b",
    "/%61dmin",
    "/a%2Db",
    "/a%7eb",
    "/a%zz",
    "/a%4",
    "/a%",
    "/a|b",
    "/a^b",
    "/a\"b",
    "/a[b]",
    "/a{b}",
    "/a`b",
    "/\u{e4}",
];

/// T6: a path that could be read in two ways is refused, before any rule and whatever the rules say.
#[tokio::test]
async fn a_path_that_could_be_read_in_two_ways_is_refused() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let table = format!("{}allow = ['* /**']", secret.line);
    let app = start_app(&server.table("api", &table)).await;
    for path in AMBIGUOUS {
        assert!(RequestPath::parse(path).is_err(), "{path}");
        let head =
            format!("GET /connect/api{path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        let answer = app.client().raw(head.as_bytes()).await;
        // The server of the connection refuses some bytes itself.
        assert!(answer.starts_with("HTTP/1.1 400"), "{path}: {answer}");
    }
    assert!(server.seen().is_empty());
    for path in
        ["/", "/a", "/a/", "/a.b/c..d/...", "/a%20b", "/%C3%A9", "/a@b:c,d=e!$&'()*+~_-", "/a%2Bb"]
    {
        let head =
            format!("GET /connect/api{path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        let answer = app.client().raw(head.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer}");
        assert_eq!(server.seen().last().unwrap().target, *path);
    }
    app.stop().await;
}

/// T6: the address of a connection without a slash at its end leads to the server's first path, under its rules.
#[tokio::test]
async fn a_path_that_ends_with_the_name_is_the_first_path() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let table = |rule: &str| server.table("api", &format!("{}allow = ['{rule}']", secret.line));
    let app = start_app(&table("GET /")).await;
    for (asked, sent) in [("/connect/api", "/"), ("/connect/api?x=1", "/?x=1")] {
        assert_eq!(app.client().get(asked).await.status, 200);
        assert_eq!(server.seen().last().unwrap().target, sent);
    }
    assert_eq!(app.client().get("/connect/api/").await.status, 200);
    assert_eq!(code_of(&app.client().get("/connect/ap").await), "403 policy_denied");
    let records = app.stop().await;
    let admitted = records.iter().filter(|record| record["event"] == "connect.admitted");
    let paths: Vec<_> = admitted.map(|record| record["path"].clone()).collect();
    assert!(paths.len() == 3 && paths[0] == paths[2] && paths[0] != paths[1], "{paths:?}");
    let app = start_app(&table("GET /a")).await;
    assert_eq!(code_of(&app.client().get("/connect/api").await), "403 policy_denied");
    app.stop().await;
}

/// T6: the table of rules: a rule that allows compares the very bytes; a rule that denies compares every reading.
#[test]
fn a_rule_decides_by_method_and_path() {
    let allows = |rule: &str, method: &str, path: &str| {
        let path = RequestPath::parse(path).unwrap();
        ConnectRule::parse("allow[0]", rule).unwrap().allows(method, path)
    };
    for (rule, method, path, expected) in [
        ("GET /a", "GET", "/a", true),
        ("GET /a", "HEAD", "/a", true),
        ("HEAD /a", "GET", "/a", false),
        ("GET /a", "POST", "/a", false),
        ("* /a", "DELETE", "/a", true),
        ("GET /a", "GET", "/a/", false),
        ("GET /a", "GET", "/A", false),
        ("GET /a", "GET", "/ab", false),
        ("GET /a", "GET", "/a/b", false),
        ("GET /a/", "GET", "/a/", true),
        ("GET /", "GET", "/", true),
        ("GET /**", "GET", "/", true),
        ("GET /a/**", "GET", "/a", true),
        ("GET /a/**", "GET", "/a/", true),
        ("GET /a/**", "GET", "/a/b/c/", true),
        ("GET /a/**", "GET", "/ab", false),
        ("GET /a/**/z", "GET", "/a/z", true),
        ("GET /a/**/z", "GET", "/a/b/z/c/z", true),
        ("GET /a/**/z", "GET", "/a/b/z/c", false),
        ("GET /a/*", "GET", "/a/b", true),
        ("GET /a/*", "GET", "/a/", false),
        ("GET /a/*", "GET", "/a/b/c", false),
        ("GET /a/*/c", "GET", "/a/b/c", true),
        ("GET /a/x*.git", "GET", "/a/xy.git", true),
        ("GET /a/x*.git", "GET", "/a/x.git", true),
        ("GET /a/x*.git", "GET", "/a/y.git", false),
        ("GET /a/*b*c", "GET", "/a/abxbxc", true),
        // An escaped slash needs an escaped slash in the rule.
        ("GET /**", "GET", "/@a%2fb", false),
        ("GET /*", "GET", "/@a%2fb", false),
        ("GET /@a/b", "GET", "/@a%2fb", false),
        ("GET /@a%2f*", "GET", "/@a%2fb", true),
        ("GET /@a%2fb", "GET", "/@a%2Fb", false),
        ("GET /a%20b", "GET", "/a%20b", true),
    ] {
        assert_eq!(allows(rule, method, path), expected, "{rule}: {method} {path}");
    }
    let denies = |rule: &str, method: &str, path: &str| {
        let path = RequestPath::parse(path).unwrap();
        ConnectRule::parse("deny[0]", rule).unwrap().denies(method, path)
    };
    for (rule, method, path, expected) in [
        ("GET /a/b", "GET", "/a/b", true),
        ("GET /a/b", "GET", "/a/b/", true),
        ("GET /a/b", "GET", "/A/B", true),
        ("GET /a/b", "GET", "/a%2Fb", true),
        ("GET /a/b", "HEAD", "/a/b", true),
        ("GET /a/b", "POST", "/a/b", false),
        ("* /a/b/**", "PUT", "/a/b", true),
        ("* /a/b/**", "PUT", "/a/B/c/d", true),
        ("GET /a+b", "GET", "/a%2Bb", true),
        ("GET /a%20b", "GET", "/a%20B", true),
        ("GET /a/b", "GET", "/a/bc", false),
        ("* /**/secrets/**", "GET", "/repos/a/secrets", true),
        // A server may read an escaped slash as a part of its segment.
        ("* /@a*", "GET", "/@a%2fb-internal", true),
        ("* /*internal*", "GET", "/@a%2fb-internal", true),
    ] {
        assert_eq!(denies(rule, method, path), expected, "{rule}: {method} {path}");
    }
}

/// T6: a rule that denies wins over every rule that allows, and refusals name the rule.
#[tokio::test]
async fn a_rule_that_denies_wins() {
    let server = SecureServer::start().await;
    let secret = SecretFile::new(SECRET, "");
    let table = format!(
        "{}allow = ['GET /repos/**', 'GET /@a%2f*']\ndeny = ['* /orgs/**', '* /**/secrets/**', '* /@a/private']",
        secret.line
    );
    let app = start_app(&server.table("api", &table)).await;
    let client = app.client();
    let decide = async |path: &str| {
        let answer = client.get(&format!("/connect/api{path}")).await;
        let rule = answer.status != 200;
        if rule {
            answer.json()["error"]["rule"].as_str().unwrap().to_owned()
        } else {
            "sent".into()
        }
    };
    assert_eq!(decide("/repos/a").await, "sent");
    assert_eq!(decide("/repos/a/Secrets/x").await, "deny[1]");
    assert_eq!(decide("/orgs/a").await, "deny[0]");
    assert_eq!(decide("/@a%2Fprivate").await, "deny[2]");
    assert_eq!(decide("/@a%2fother").await, "sent");
    assert_eq!(decide("/user").await, "allow");
    assert_eq!(server.seen().len(), 2);
    app.stop().await;
}

proptest! {
    /// T6: a path that is accepted has one reading: no decoding of it has a segment of dots, a double slash, or a
    /// character that ends a path.
    #[test]
    fn an_accepted_path_has_one_reading(path in "/[a-zA-Z0-9./%;\\\\?#~-]{0,24}") {
        if RequestPath::parse(&path).is_ok() {
            let mut decoded = path.clone();
            for _ in 0..3 {
                decoded = percent_encoding::percent_decode_str(&decoded).decode_utf8_lossy().into_owned();
                prop_assert!(!decoded.contains("//") && !decoded.contains(['\\', ';', '?', '#']));
                prop_assert!(decoded.split('/').all(|segment| !matches!(segment, "." | "..")));
            }
        }
    }

    /// T6: a rule for a literal path allows that path only.
    #[test]
    fn a_literal_rule_allows_one_path(one in "(/[ab%20]{1,3}){1,4}/?", other in "(/[ab%20]{1,3}){1,4}/?") {
        if let (Ok(rule), Ok(path)) =
            (ConnectRule::parse("allow[0]", &format!("GET {one}")), RequestPath::parse(&other))
        {
            prop_assert_eq!(rule.allows("GET", path), one == other);
        }
    }
}
