//! T6: Tests of the beginning and the end of tunnels: the handshake, the bound of open tunnels, and the end of the run.

use std::io::{Read, Write};
use std::sync::Arc;
use std::time::{Duration, Instant};

use cogni_gateway::gateway::run::control::RunControlState;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, Stream};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use super::server::{Answer, SecureServer};
use super::tunnel::{
    HOST, ask, connect, local_lookup, open_tunnel, start_tunnelled, trusting_client,
};
use super::{app_with, start_with_lookup};
use crate::support::app::TestApp;
use cogni_gateway::runner::tool_opener::RunToolOpener;

const OPEN: &str = "tunnel = true\nallow = ['* /**']";

/// Tries a handshake in a new tunnel.
async fn shake_hands(app: &TestApp, authority: &str, name: &str, config: ClientConfig) -> bool {
    let (stream, _) = connect(app, &format!("CONNECT {authority} HTTP/1.1\r\n\r\n")).await;
    let name = ServerName::try_from(name.to_owned()).unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, stream).await.is_ok()
}

/// T6: a client that asks in TLS for another host or for none, or speaks HTTP/2 only, gets no certificate.
#[tokio::test]
async fn a_handshake_for_another_host_fails() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let app = start_tunnelled(&server.table("api", OPEN)).await;
    let (own, trusting) = (server.authority(), trusting_client(&app).await);
    assert!(shake_hands(&app, &own, HOST, trusting.clone()).await);
    assert!(!shake_hands(&app, &own, "other.example.test", trusting.clone()).await);
    assert!(!shake_hands(&app, &own, "127.0.0.1", trusting.clone()).await);
    let mut silent = trusting.clone();
    silent.enable_sni = false;
    assert!(!shake_hands(&app, &own, HOST, silent).await);
    let mut http2 = trusting.clone();
    http2.alpn_protocols = vec![b"h2".to_vec()];
    assert!(!shake_hands(&app, &own, HOST, http2).await);
    // Another run has another authority.
    let other = start_tunnelled(&server.table("api", OPEN)).await;
    assert!(!shake_hands(&other, &own, HOST, trusting).await);
    other.stop().await;
    assert!(server.seen().is_empty());
    app.stop().await;
}

/// T6: bytes without TLS reach nothing, and a handshake that does not go on is cut.
#[tokio::test]
async fn a_tunnel_without_tls_ends() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let app = app_with(&server.table("api", OPEN), |config| {
        config.server.header_timeout = Duration::from_millis(300);
    })
    .await;
    let own = server.authority();
    let plain = format!("GET /a HTTP/1.1\r\nhost: {own}\r\n\r\n");
    for first in [&*plain, "", "\x16\x03\x01"] {
        let (mut stream, _) = connect(&app, &format!("CONNECT {own} HTTP/1.1\r\n\r\n")).await;
        stream.write_all(first.as_bytes()).await.unwrap();
        let mut rest = vec![];
        let _ = stream.read_to_end(&mut rest).await;
        assert!(!rest.starts_with(b"HTTP"), "{rest:?}");
    }
    // A tunnel that is idle after its handshake ends like an idle connection.
    let mut idle = open_tunnel(&app, &own).await;
    let begun = Instant::now();
    let _ = idle.read_to_end(&mut vec![]).await;
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert!(server.seen().is_empty());
    // The lines are written when the tunnels have ended.
    let (mut log, mut lines) = (String::new(), vec![]);
    while lines.len() < 4 {
        log = std::fs::read_to_string(app.access_log()).unwrap();
        lines = log.lines().filter(|line| line.contains("HOST:PORT")).collect();
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let failed = lines.iter().filter(|line| line.contains("tunnel_handshake_failed"));
    assert_eq!(failed.count(), 3, "{log}");
    app.stop().await;
}

/// T6: a client that sends its first bytes of TLS together with its request for the tunnel is served.
#[tokio::test(flavor = "multi_thread")]
async fn bytes_behind_the_request_belong_to_the_tunnel() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let app = start_tunnelled(&server.table("api", OPEN)).await;
    let (own, config) = (server.authority(), trusting_client(&app).await);
    let socket = app.socket.clone();
    let asking = move || {
        let name = ServerName::try_from(HOST).unwrap();
        let mut tls = ClientConnection::new(Arc::new(config), name).unwrap();
        let mut bytes = format!("CONNECT {own} HTTP/1.1\r\nhost: {own}\r\n\r\n").into_bytes();
        tls.write_tls(&mut bytes).unwrap();
        let mut socket = std::os::unix::net::UnixStream::connect(socket).unwrap();
        socket.write_all(&bytes).unwrap();
        let (mut head, mut byte) = (vec![], [0]);
        while !head.ends_with(b"\r\n\r\n") {
            socket.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let mut stream = Stream::new(&mut tls, &mut socket);
        let request = format!("GET /a HTTP/1.1\r\nhost: {own}\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = vec![];
        let _ = stream.read_to_end(&mut answer);
        String::from_utf8(answer).unwrap()
    };
    let answer = tokio::task::spawn_blocking(asking).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200") && answer.contains("\r\nok\r\n"), "{answer}");
    app.stop().await;
}

/// T6: a run has at most 64 tunnels open. A tunnel that ends makes room.
#[tokio::test]
async fn open_tunnels_are_bounded() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let app = start_tunnelled(&server.table("api", OPEN)).await;
    let request = format!("CONNECT {} HTTP/1.1\r\n\r\n", server.authority());
    let mut open = vec![];
    for _ in 0..64 {
        let (stream, head) = connect(&app, &request).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        open.push(stream);
    }
    let (_, head) = connect(&app, &request).await;
    assert!(head.starts_with("HTTP/1.1 429") && head.contains("retry-after: 1"), "{head}");
    // Requests without a tunnel are served meanwhile.
    assert_eq!(app.client().get("/connect/api/a").await.status, 200);
    open.clear();
    while !connect(&app, &request).await.1.starts_with("HTTP/1.1 200") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    app.stop().await;
}

/// T6, T1: a paused run opens no tunnel, and one that is open sends nothing.
#[tokio::test]
async fn a_paused_run_opens_no_tunnel() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let app = start_tunnelled(&server.table("api", OPEN)).await;
    let own = server.authority();
    let mut stream = open_tunnel(&app, &own).await;
    let request = format!("CONNECT {own} HTTP/1.1\r\n\r\n");
    app.run.control.set_state(RunControlState::Paused);
    assert!(connect(&app, &request).await.1.starts_with("HTTP/1.1 429"));
    let get = format!("GET /a HTTP/1.1\r\nhost: {own}\r\nconnection: close\r\n\r\n");
    stream.write_all(get.as_bytes()).await.unwrap();
    let mut answer = vec![];
    let _ = stream.read_to_end(&mut answer).await;
    assert!(answer.starts_with(b"HTTP/1.1 429"));
    app.run.control.set_state(RunControlState::Draining);
    assert!(connect(&app, &request).await.1.starts_with("HTTP/1.1 403"));
    assert!(server.seen().is_empty());
    app.stop().await;
}

/// T6, T1: an operator's end of the run ends idle tunnels and open requests in them, each settled once.
#[tokio::test]
async fn the_end_of_the_run_ends_its_tunnels() {
    let server =
        SecureServer::named(HOST, |_| Answer { is_open: true, ..Answer::text("first") }).await;
    let app = start_tunnelled(&server.table("api", OPEN)).await;
    let own = server.authority();
    let (mut idle, mut busy) = (open_tunnel(&app, &own).await, open_tunnel(&app, &own).await);
    let (mut half_open, _) = connect(&app, &format!("CONNECT {own} HTTP/1.1\r\n\r\n")).await;
    let get = format!("GET /a HTTP/1.1\r\nhost: {own}\r\n\r\n");
    busy.write_all(get.as_bytes()).await.unwrap();
    let mut seen = vec![];
    while !seen.ends_with(b"first\r\n") {
        seen.push(busy.read_u8().await.unwrap());
    }
    let begun = Instant::now();
    app.run.control.abort_calls();
    for stream in [&mut idle, &mut busy] {
        let _ = stream.read_to_end(&mut vec![]).await;
    }
    let _ = half_open.read_to_end(&mut vec![]).await;
    assert!(begun.elapsed() < Duration::from_secs(10));
    let settled = app.recorded("connect.settled", 1).await;
    assert_eq!((settled.len(), &settled[0]["outcome"]), (1, &json!("shut_down")));
    app.stop().await;
}

/// T6: a shutdown ends idle tunnels at once, and lets a request in a tunnel end.
#[tokio::test]
async fn a_shutdown_drains_tunnels() {
    let server = SecureServer::named(HOST, |_| {
        std::thread::sleep(Duration::from_millis(300));
        Answer::text("late")
    })
    .await;
    let app = start_tunnelled(&server.table("api", OPEN)).await;
    let own = server.authority();
    let mut idle = open_tunnel(&app, &own).await;
    let mut busy = open_tunnel(&app, &own).await;
    let get = format!("GET /a HTTP/1.1\r\nhost: {own}\r\n\r\n");
    busy.write_all(get.as_bytes()).await.unwrap();
    app.recorded("connect.admitted", 1).await;
    app.begin_stop();
    let _ = idle.read_to_end(&mut vec![]).await;
    let mut answer = vec![];
    let _ = busy.read_to_end(&mut answer).await;
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.contains("\r\nlate\r\n0\r\n"), "{answer}");
    let records = app.stop().await;
    let settled = records.iter().find(|record| record["event"] == "connect.settled").unwrap();
    assert_eq!(settled["outcome"], "completed");
}

/// T6: the run's deadline ends tunnels, and no tunnel opens after it.
#[tokio::test]
async fn the_deadline_ends_tunnels() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let opener = RunToolOpener { lookup: Some(local_lookup()), ..RunToolOpener::default() };
    let app = app_with(&server.table("api", OPEN), |config| {
        config.tools.opener = Some(Arc::new(opener));
        config.budget.deadline = Some(Duration::from_secs(1));
    })
    .await;
    let own = server.authority();
    let mut idle = open_tunnel(&app, &own).await;
    let _ = idle.read_to_end(&mut vec![]).await;
    let (_, head) = connect(&app, &format!("CONNECT {own} HTTP/1.1\r\n\r\n")).await;
    assert!(head.starts_with("HTTP/1.1 402"), "{head}");
    app.stop().await;
}

/// T6: a request in a tunnel goes to a checked address like any other.
#[tokio::test]
async fn a_tunnel_leads_to_checked_addresses() {
    let server = SecureServer::named(HOST, |_| Answer::text("ok")).await;
    let lookup: super::HostLookup = Arc::new(|_, _| Ok(vec!["169.254.169.254".parse().unwrap()]));
    let app = start_with_lookup(&server.table("api", OPEN), lookup).await;
    let own = server.authority();
    let get = format!("GET /a HTTP/1.1\r\nhost: {own}\r\nconnection: close\r\n\r\n");
    let answer = ask(&app, &own, &get).await;
    assert!(answer.starts_with("HTTP/1.1 502") && answer.contains("address_refused"), "{answer}");
    app.stop().await;
}
