//! G8: Tests of name resolution: the upstream's name is resolved for each connection.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;

use serde_json::json;

use crate::support::client::TestClient;
use crate::support::model_provider;
use crate::support::process::ChildProcess;

/// G8: If a name's address changes, as that of a container does when it is created again, the next connection uses the
/// new address.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_moves_is_followed() {
    for scheme in ["http", "h2c"] {
        let dir = tempfile::tempdir().unwrap();
        let (hosts, socket) = (dir.path().join("hosts"), dir.path().join("llm.sock"));
        let first = model_provider::start_at(SocketAddr::from(([127, 0, 0, 2], 0)), "").await;
        let port = first.addr.port();
        fs::write(&hosts, "127.0.0.2 llm.test\n").unwrap();
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", WITH_HOSTS, "sh"]).arg(&hosts);
        command
            .args([env!("CARGO_BIN_EXE_cogni-gateway"), "proxy"])
            .env("RUN_ID", "run-1")
            .env("BILLING_ACCOUNT_ID", "acct-1")
            .env("LITELLM_MASTER_KEY", "sk-very-secret")
            .env("LITELLM_HOST", format!("{scheme}://llm.test:{port}"))
            .env("SOCKET_PATH", &socket)
            .env("ACCESS_LOG_PATH", "off");
        let mut gateway = ChildProcess::start(&mut command, "run it as root");
        tokio::task::block_in_place(|| gateway.until(|output| output.contains("ready")));
        let client = TestClient::new(&socket);
        let call = json!({"model": "fake", "messages": []});
        let answer = client.post("/v1/chat/completions", &call).await;
        assert_eq!(
            (answer.status.as_u16(), first.seen.request_count()),
            (200, 1),
            "{}",
            gateway.output()
        );

        let second = model_provider::start_at(SocketAddr::from(([127, 0, 0, 3], port)), "").await;
        fs::write(&hosts, "127.0.0.3 llm.test\n").unwrap();
        drop(first);
        // A connection to the first address may be used until its server has closed it.
        while second.seen.request_count() == 0 {
            client.post("/v1/chat/completions", &call).await;
        }
        assert!(tokio::task::block_in_place(|| gateway.terminate()).success());
    }
}

/// Runs a program with its own hosts file.
const WITH_HOSTS: &str = "mount --bind \"$1\" /etc/hosts && shift && exec \"$@\"";
