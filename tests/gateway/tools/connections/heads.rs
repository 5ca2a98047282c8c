//! T6: Tests of the heads of requests and answers: hop by hop headers, pages of other sites, links, and methods.

use http::Method;

use super::aws::{KEY, KeyFile};
use super::server::{Answer, ConnectedRequest, SecureServer};
use super::{code_of, start_app};

/// A header that `Connection` names belongs to one hop, also if a list names it.
#[tokio::test]
async fn headers_of_one_hop_do_not_pass() {
    let server = SecureServer::start().await;
    let app = start_app(&server.table("api", "allow = ['GET /**']\nheaders = ['x-own']\n")).await;
    let headers = [
        ("connection", "Accept, x-own"),
        ("connection", "range"),
        ("accept", "text/html"),
        ("x-own", "1"),
        ("range", "bytes=0-1"),
        ("if-match", "a"),
    ];
    app.client().ask(Method::GET, "/connect/api/a", "", &headers).await;
    let seen = server.seen().remove(0);
    let mut names: Vec<_> = seen.headers.keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["accept-encoding", "host", "if-match"]);
    app.stop().await;
}

/// A request whose method has a content announces that its body is empty: S3 answers 411 to others. A body that comes
/// keeps its own length.
#[tokio::test]
async fn an_empty_body_is_announced() {
    let (server, key) = (SecureServer::start().await, KeyFile::new(&KEY));
    let app = start_app(&key.tables_of_each_kind(&server)).await;
    let mut expected = vec![];
    for name in ["api", "s3", "other"] {
        for (method, length) in
            [("PUT", "0"), ("POST", "0"), ("PATCH", "0"), ("GET", "-"), ("DELETE", "-")]
        {
            for announced in ["", "content-length: 0\r\n"] {
                let request = format!(
                    "{method} /connect/{name}/b/a HTTP/1.1\r\nhost: x\r\n{announced}connection: close\r\n\r\n"
                );
                let answer = app.client().raw(request.as_bytes()).await;
                assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
                expected.push(length);
            }
        }
        app.client().ask(Method::PUT, &format!("/connect/{name}/b/a"), "four", &[]).await;
        expected.push("4");
    }
    let seen = server.seen();
    let length = |seen: &ConnectedRequest| {
        assert!(!seen.headers.contains_key("transfer-encoding"));
        seen.headers
            .get("content-length")
            .map_or("-".to_owned(), |own| own.to_str().unwrap().to_owned())
    };
    assert_eq!(seen.iter().map(length).collect::<Vec<_>>(), expected);
    app.stop().await;
}

/// A link on a page of another site brings no `Origin`, but its relation to the site: it is refused on every path of
/// tools and connections.
#[tokio::test]
async fn a_link_on_a_page_of_another_site_is_refused() {
    let server = SecureServer::start().await;
    let app = start_app(&server.table("api", "allow = ['GET /**']\n")).await;
    for (site, expected) in [
        ("cross-site", "403 foreign_origin"),
        ("something-new", "403 foreign_origin"),
        ("same-origin", "200 -"),
        ("same-site", "200 -"),
        ("none", "200 -"),
    ] {
        for path in ["/connect/api/a", "/connect"] {
            let headers = [("sec-fetch-site", site)];
            let answer = app.client().ask(Method::GET, path, "", &headers).await;
            assert_eq!(code_of(&answer), expected, "{site} {path}");
        }
    }
    for path in ["/tool/exec", "/mcp"] {
        let headers = [("sec-fetch-site", "cross-site"), ("content-type", "application/json")];
        let answer = app.client().ask(Method::POST, path, "{}", &headers).await;
        assert_eq!(answer.status, 403, "{path}");
    }
    assert_eq!(server.seen().len(), 3);
    app.stop().await;
}

/// Of two connections to one server, links lead through the one that has answered. A part of a page passes as it is.
#[tokio::test]
async fn links_lead_through_the_connection_that_answers() {
    let server = SecureServer::answering(|seen| {
        let host = seen.headers["host"].to_str().unwrap();
        let answer = Answer::text(format!("<a href='https://{host}/file'>"))
            .with("content-type", "text/html")
            .with("etag", "\"1\"");
        match &*seen.target {
            "/part" => Answer { status: 206, ..answer }.with("content-range", "bytes 0-9/100"),
            "/odd-part" => Answer { status: 206, ..answer },
            _ => answer,
        }
    })
    .await;
    let open = "allow = ['GET /**']\nrewrite_links = true\n";
    let app = start_app(&(server.table("one", open) + &server.table("two", open))).await;
    for name in ["one", "two"] {
        let answer = app.client().get(&format!("/connect/{name}/page")).await;
        let link = format!("http://localhost:8080/connect/{name}/file");
        assert_eq!(answer.text(), format!("<a href='{link}'>"));
        assert_eq!(answer.header("etag"), None);
        for path in ["part", "odd-part"] {
            let answer = app.client().get(&format!("/connect/{name}/{path}")).await;
            assert_eq!(answer.text(), format!("<a href='{}/file'>", server.url()), "{path}");
            assert_eq!((answer.status.as_u16(), answer.header("etag")), (206, Some("\"1\"")));
        }
    }
    app.stop().await;
}

/// The method of a refused request is the client's own text, of which a record has the beginning.
#[tokio::test]
async fn a_record_has_the_beginning_of_a_method() {
    let server = SecureServer::start().await;
    let app = start_app(&server.table("api", "allow = ['* /**']\n")).await;
    let method = Method::from_bytes("M".repeat(200).as_bytes()).unwrap();
    for path in ["/connect/api/a", "/v1/unknown"] {
        app.client().ask(method.clone(), path, "", &[]).await;
    }
    let records = app.stop().await;
    let methods: Vec<_> = records.iter().filter_map(|record| record["method"].as_str()).collect();
    assert_eq!(methods, [&*"M".repeat(64); 2]);
}
