//! Tests of `cogni-gateway provider`: its flags, its first line, and its end.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process;

use clap::Parser as _;
use cogni_gateway::cli::provider::{ProviderArgs, serve};
use insta::assert_snapshot;
use serde_json::json;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::raw_client::{post_json, read_reply, read_until, send_json};

#[derive(Debug, clap::Parser)]
#[command(name = "provider")]
struct ProviderCommand {
    #[command(flatten)]
    args: ProviderArgs,
}

#[test]
fn a_wrong_script_is_refused_at_the_command_line() {
    let error =
        ProviderCommand::try_parse_from(["provider", "--script", "chunks=3,wait=1s"]).unwrap_err();
    assert_snapshot!(error, @r#"
    error: invalid value 'chunks=3,wait=1s' for '--script <SCRIPT>': `wait` is not a script option; the options are text, chunks, size, interval, first_byte, coalesce, split, stamps, usage, input, output, cached, cache_write, reasoning, obey, status, retry_after, should_retry, tool, arguments, repeat, echo, done, gate, fault

    For more information, try '--help'.
    "#);
}

#[tokio::test]
async fn the_address_is_announced_in_one_line() {
    let (reader, writer) = std::io::pipe().unwrap();
    let command = ProviderCommand::try_parse_from(["provider", "--script", "text=hi"]).unwrap();
    let stop = CancellationToken::new();
    let client = async {
        let mut line = String::new();
        let line =
            spawn_blocking(move || BufReader::new(reader).read_line(&mut line).map(|_| line));
        let line = line.await.unwrap().unwrap();
        let addr = line.strip_prefix("provider listening on http://").unwrap().trim_end();
        let reply = post_json(addr.parse().unwrap(), "/v1/completions", &json!({})).await.json();
        stop.cancel();
        reply
    };
    let (served, reply) = tokio::join!(serve(command.args, writer, stop.clone()), client);
    served.unwrap();
    assert_eq!(reply["choices"][0]["text"], "hi");
}

#[tokio::test]
async fn sigterm_ends_the_process_though_an_answer_stalls() {
    let mut process = ProviderProcess::start(&["provider", "--script", "fault=stall@1"]);
    let body = json!({ "model": "m", "stream": true });
    let mut client = send_json(process.addr(), "/v1/chat/completions", &body).await;
    read_until(&mut client, "hello").await;
    let pid = process.0.id().to_string();
    assert!(process::Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    assert!(process.0.wait().unwrap().success());
    assert!(!read_reply(&mut client).await.whole);
}

/// The built program; killed if the test leaves it running.
struct ProviderProcess(process::Child);

impl ProviderProcess {
    fn start(args: &[&str]) -> Self {
        let mut command = process::Command::new(env!("CARGO_BIN_EXE_cogni-gateway"));
        Self(command.args(args).stdout(process::Stdio::piped()).spawn().unwrap())
    }

    /// Reads the announced address.
    fn addr(&mut self) -> SocketAddr {
        let mut line = String::new();
        BufReader::new(self.0.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        line.trim_end().rsplit('/').next().unwrap().parse().unwrap()
    }
}

impl Drop for ProviderProcess {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
