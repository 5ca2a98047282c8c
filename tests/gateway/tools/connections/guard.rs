//! T6: Tests that no answer brings a credential of the run back, whichever server got it, and whenever.

use std::fs;
use std::sync::{Arc, Mutex};

use serde_json::json;

use super::server::{Answer, SecureServer};
use super::{SECRET, SecretFile, code_of, start_app};
use crate::support::app::TestApp;

/// A server that answers with a text that the test sets.
struct EchoServer {
    server: SecureServer,
    text: Arc<Mutex<String>>,
}

impl EchoServer {
    async fn start() -> Self {
        let text = Arc::<Mutex<String>>::default();
        let told = Arc::clone(&text);
        let server = SecureServer::answering(move |seen| {
            let text = told.lock().unwrap().clone();
            match &*seen.target {
                "/header" => Answer::text("ok").with("x-told", &text),
                _ => Answer::text(format!("before {text} behind")),
            }
        })
        .await;
        Self { server, text }
    }

    /// Lets the server repeat a text, and returns the codes of an answer's body and of a header.
    async fn repeat(&self, app: &TestApp, connection: &str, text: &str) -> [String; 2] {
        text.clone_into(&mut self.text.lock().unwrap());
        let ask = async |path: &str| {
            code_of(&app.client().get(&format!("/connect/{connection}/{path}")).await)
        };
        [ask("body").await, ask("header").await]
    }
}

const ECHOED: [&str; 2] = ["502 credential_echoed"; 2];
const PASSED: [&str; 2] = ["200 -"; 2];

/// A server that knows the credential of another connection cannot give it to the agent, also one that got none itself.
#[tokio::test]
async fn another_connections_credential_does_not_come_back() {
    let (echo, other) = (EchoServer::start().await, SecureServer::start().await);
    let (own, others) = (SecretFile::new(SECRET, ""), SecretFile::new("others-secret-1", ""));
    let rules = "allow = ['GET /**']\n";
    let table = echo.server.table("own", &format!("{}{rules}", own.line))
        + &echo.server.table("bare", rules)
        + &other.table("other", &format!("{}{rules}", others.line));
    let app = start_app(&table).await;
    for connection in ["own", "bare"] {
        assert_eq!(echo.repeat(&app, connection, "harmless").await, PASSED);
        assert_eq!(echo.repeat(&app, connection, SECRET).await, ECHOED);
        // The run has not used the other connection, and may.
        assert_eq!(echo.repeat(&app, connection, "others-secret-1").await, ECHOED);
    }
    assert_eq!(app.client().get("/connect/other/a").await.status, 200);
    others.replace("others-secret-2");
    for connection in ["own", "bare"] {
        assert_eq!(echo.repeat(&app, connection, "others-secret-1").await, ECHOED, "the old value");
        assert_eq!(echo.repeat(&app, connection, "others-secret-2").await, ECHOED, "the new value");
    }
    let records = app.stop().await;
    let found = records.iter().filter(|record| record["outcome"] == "credential_echoed");
    assert_eq!(found.count(), 16);
}

/// A value that was replaced since the request is still searched for, and so is one that a program has printed.
#[tokio::test]
async fn a_replaced_credential_does_not_come_back() {
    let echo = EchoServer::start().await;
    let own = SecretFile::new("first-secret", "");
    let directory = tempfile::tempdir().unwrap();
    let printed = directory.path().join("token");
    fs::write(&printed, "printed-secret-1").unwrap();
    let command = format!("credential = {{ command = ['/bin/cat', '{}'] }}\n", printed.display());
    let rules = "allow = ['GET /**']\n";
    let table = echo.server.table("own", &format!("{}{rules}", own.line))
        + &echo.server.table("program", &format!("{command}{rules}"));
    let app = start_app(&table).await;
    // A program runs for its own requests only, so its value is known with the first one.
    assert_eq!(echo.repeat(&app, "own", "printed-secret-1").await, PASSED);
    assert_eq!(echo.repeat(&app, "program", "harmless").await, PASSED);
    own.replace("second-secret");
    fs::write(&printed, "printed-secret-2").unwrap();
    assert_eq!(echo.repeat(&app, "program", "harmless").await, PASSED);
    for connection in ["own", "program"] {
        for secret in ["first-secret", "second-secret", "printed-secret-1", "printed-secret-2"] {
            assert_eq!(
                echo.repeat(&app, connection, secret).await,
                ECHOED,
                "{connection} {secret}"
            );
        }
    }
    app.stop().await;
}

/// Bodies in which the credential of another connection stands across frames are cut before it.
#[tokio::test]
async fn another_connections_credential_is_cut_out_of_a_stream() {
    let server = SecureServer::answering(|_| {
        let (one, two) = SECRET.split_at(9);
        let frames = vec![format!("before {one}").into_bytes(), two.as_bytes().to_vec()];
        Answer { frames, ..Answer::text("") }
    })
    .await;
    let (own, others) = (SecretFile::new("own-secret-of-this", ""), SecretFile::new(SECRET, ""));
    let rules = "allow = ['* /**']\n";
    let table = server.table("own", &format!("{}{rules}", own.line))
        + &server.table("other", &format!("{}{rules}", others.line));
    let app = start_app(&table).await;
    let stream = app.client().open("/connect/own/a", &json!({})).await;
    let is_refused = stream.status == 502;
    let (text, is_whole) = stream.rest().await;
    assert!(is_refused || (!is_whole && "before ".starts_with(&text)), "{text}");
    app.stop().await;
}
