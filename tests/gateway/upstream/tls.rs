//! G8: Tests of upstreams over TLS and over HTTP/2.

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use cogni_gateway::fakes::model_provider::AnswerEnd;
use cogni_gateway::gateway::config::GatewayConfig;
use cogni_gateway::gateway::process::GatewayProcess;
use serde_json::{Value, json};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::support::app::{TestApp, run_config};
use crate::support::test_ca::TestCa;

/// G8: Calls use whatever protocol the server offers, HTTP/2 if possible.
#[tokio::test]
async fn calls_go_over_tls() {
    let offers: [(&[&str], &str); 3] =
        [(&["h2"], "HTTP/2.0"), (&["http/1.1"], "HTTP/1.1"), (&[], "HTTP/1.1")];
    for (protocols, version) in offers {
        let front = TlsListener::new("127.0.0.1", protocols).await;
        let app = front.app(&front.authority.file).await;
        for stream in [false, true, false] {
            let answer =
                app.client().post("/v1/chat/completions", &chat_body("fake", stream)).await;
            assert_eq!(answer.status, 200);
        }
        let seen = app.upstream.seen.last_request().unwrap();
        assert_eq!(
            (seen.version.as_str(), seen.header("authorization")),
            (version, Some("Bearer sk-real"))
        );
        assert_eq!(app.upstream.seen.connection_count(), 1, "{version}");
        app.stop().await;
    }
}

/// G8: If a CA file is configured, only its CAs are trusted, and not the system's.
#[tokio::test]
async fn an_authority_that_is_not_trusted_is_refused() {
    let front = TlsListener::new("127.0.0.1", &["h2"]).await;
    let app = front.app(&TestCa::new().file).await;
    let answer = app.client().post("/v1/chat/completions", &chat_body("fake", false)).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (502, &json!("upstream_unreachable"))
    );
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G8: A trusted certificate for another name is refused.
#[tokio::test]
async fn a_certificate_for_another_name_is_refused() {
    let front = TlsListener::new("elsewhere.example", &["h2"]).await;
    let app = front.app(&front.authority.file).await;
    let answer = app.client().post("/v1/chat/completions", &chat_body("fake", false)).await;
    assert_eq!(answer.json()["error"]["code"], "upstream_unreachable");
    assert_eq!(app.upstream.seen.request_count(), 0);
    app.stop().await;
}

/// G8: An error in the CA file is reported before anything is served.
#[tokio::test]
async fn authorities_that_cannot_be_loaded_are_an_error_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let attempt = |name: &str, text: Option<&str>| {
        let file = dir.path().join(name);
        if let Some(text) = text {
            fs::write(&file, text).unwrap();
        }
        let mut config = run_config(dir.path(), SocketAddr::from(([127, 0, 0, 1], 1)));
        config.upstream.url = "https://127.0.0.1:1".parse().unwrap();
        config.upstream.ca_file = Some(file);
        let error = GatewayProcess::build_process(config).err().unwrap();
        assert!(!dir.path().join("llm.sock").exists(), "the socket is there already");
        format!("{error:#}").replace(dir.path().to_str().unwrap(), "[dir]")
    };
    insta::assert_snapshot!(attempt("missing", None), @"the upstream's authorities cannot be loaded: `[dir]/missing` cannot be read: No such file or directory (os error 2)");
    insta::assert_snapshot!(attempt("empty", Some("")), @"the upstream's authorities cannot be loaded: `[dir]/empty` holds no certificate");
    insta::assert_snapshot!(attempt("bad", Some("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")), @"the upstream's authorities cannot be loaded: `[dir]/bad` holds a bad certificate: invalid peer certificate: BadEncoding");
}

/// G8: Unencrypted HTTP/2 carries concurrent calls on one connection.
#[tokio::test]
async fn calls_share_an_http2_connection() {
    let app = over_http2(|_| ()).await;
    let mut streams = vec![];
    for _ in 0..10 {
        streams.push(app.client().open("/v1/messages", &chat_body("fake/gate=1", true)).await);
    }
    app.upstream.gate.wait_for_waiting(10).await;
    app.upstream.gate.allow_answers(10);
    for stream in streams {
        let (rest, in_order) = stream.rest().await;
        assert!(in_order && rest.contains("message_stop"));
    }
    let seen = &app.upstream.seen;
    assert_eq!(
        (seen.last_request().unwrap().version.as_str(), seen.connection_count()),
        ("HTTP/2.0", 1)
    );
    app.stop().await;
}

/// G7: A stream that the upstream resets is broken for the client, too.
#[tokio::test]
async fn a_reset_http2_stream_is_never_ended_in_order() {
    let app = over_http2(|_| ()).await;
    let body = chat_body("fake/gate=2;fault=reset@2", true);
    let mut stream = app.client().open("/v1/messages", &body).await;
    assert!(stream.frame().await.unwrap().is_some());
    app.upstream.gate.allow_answers(1);
    let (rest, in_order) = stream.rest().await;
    assert!(!in_order && !rest.contains("message_stop"), "{rest}");
    let settled = app.recorded("request.settled", 1).await.remove(0);
    assert_eq!(
        (&settled["outcome"], &settled["code"]),
        (&json!("upstream_failed"), &json!("upstream_closed"))
    );
    app.stop().await;
}

/// G8: A delivered call is not repeated over HTTP/2 either.
#[tokio::test]
async fn a_delivered_http2_call_is_not_repeated() {
    let app = over_http2(|_| ()).await;
    for calls in 1..=2 {
        let answer =
            app.client().post("/v1/messages", &chat_body("fake/fault=reset@head", false)).await;
        assert_eq!((answer.status.as_u16(), app.upstream.seen.request_count()), (502, calls));
    }
    app.stop().await;
}

/// G8: A client that disconnects cancels its own HTTP/2 call and no other.
#[tokio::test]
async fn a_client_that_leaves_cancels_its_http2_call() {
    let app = over_http2(|_| ()).await;
    let stays = app.client().open("/v1/chat/completions", &chat_body("fake/gate=1", true)).await;
    let leaves = app.client().open("/v1/chat/completions", &chat_body("fake/gate=1", true)).await;
    app.upstream.gate.wait_for_waiting(2).await;
    drop(leaves);
    app.upstream
        .seen
        .wait_until(|seen| seen.last_request().unwrap().ended == Some(AnswerEnd::ClientLeft))
        .await;
    app.upstream.gate.allow_answers(1);
    assert!(stays.rest().await.1);
    app.stop().await;
}

/// G8: HTTP/2 has the same timeout as HTTP/1.1.
#[tokio::test]
async fn silence_before_an_http2_head_is_a_timeout() {
    let app =
        over_http2(|config| config.upstream.first_byte_timeout = Duration::from_millis(50)).await;
    let answer =
        app.client().post("/v1/messages", &chat_body("fake/fault=stall@head", false)).await;
    assert_eq!(
        (answer.status.as_u16(), &answer.json()["error"]["code"]),
        (504, &json!("upstream_first_byte_timeout"))
    );
    app.stop().await;
}

/// A TLS listener for use in front of a provider.
struct TlsListener {
    authority: TestCa,
    listener: Arc<TcpListener>,
    acceptor: TlsAcceptor,
}

impl TlsListener {
    async fn new(name: &str, protocols: &[&str]) -> Self {
        let authority = TestCa::new();
        let acceptor = TlsAcceptor::from(Arc::new(authority.server(name, protocols)));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        Self { authority, listener: Arc::new(listener), acceptor }
    }

    /// Starts a gateway that trusts the CAs in `ca_file` and reaches its provider through this listener.
    async fn app(&self, ca_file: &Path) -> TestApp {
        let address = self.listener.local_addr().unwrap();
        let app = TestApp::with(|config| {
            config.upstream.url = format!("https://{address}").parse().unwrap();
            config.upstream.ca_file = Some(ca_file.to_owned());
            config.upstream.pool_idle_timeout = Duration::from_hours(1);
        })
        .await;
        let (listener, acceptor) = (Arc::clone(&self.listener), self.acceptor.clone());
        let provider = app.upstream.addr;
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let acceptor = acceptor.clone();
                tokio::spawn(async move {
                    let Ok(mut stream) = acceptor.accept(stream).await else { return };
                    let mut provider = TcpStream::connect(provider).await.unwrap();
                    let _ = copy_bidirectional(&mut stream, &mut provider).await;
                });
            }
        });
        app
    }
}

async fn over_http2(configure: impl FnOnce(&mut GatewayConfig)) -> TestApp {
    TestApp::with(|config| {
        let url = config.upstream.url.to_string().replace("http://", "h2c://");
        config.upstream.url = url.parse().unwrap();
        configure(config);
    })
    .await
}

fn chat_body(model: &str, stream: bool) -> Value {
    json!({"model": model, "stream": stream, "max_tokens": 100, "messages": []})
}
