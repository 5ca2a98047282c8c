//! `cogni-gateway provider`, as far as it goes without a process of its own.

use std::io::{BufRead as _, BufReader};

use clap::Parser as _;
use cogni_gateway::cli::provider::{Args, serve};
use insta::assert_snapshot;
use serde_json::json;
use tokio::task::spawn_blocking;
use tokio_util::sync::CancellationToken;

use super::client::post;

#[derive(Debug, clap::Parser)]
#[command(name = "provider")]
struct Command {
    #[command(flatten)]
    args: Args,
}

#[test]
fn a_wrong_script_is_refused_at_the_command_line() {
    let error = Command::try_parse_from(["provider", "--script", "chunks=3,wait=1s"]).unwrap_err();
    assert_snapshot!(error, @r#"
    error: invalid value 'chunks=3,wait=1s' for '--script <SCRIPT>': `wait` is not a knob; there are text, chunks, size, interval, first_byte, coalesce, split, stamps, usage, input, output, cached, cache_write, reasoning, obey, status, retry_after, should_retry, tool, arguments, repeat, done, gate, fault

    For more information, try '--help'.
    "#);
}

#[tokio::test]
async fn the_address_is_announced_in_one_line() {
    let (reader, writer) = std::io::pipe().unwrap();
    let command = Command::try_parse_from(["provider", "--script", "text=hi"]).unwrap();
    let stop = CancellationToken::new();
    let client = async {
        let mut line = String::new();
        let line =
            spawn_blocking(move || BufReader::new(reader).read_line(&mut line).map(|_| line));
        let line = line.await.unwrap().unwrap();
        let addr = line.strip_prefix("provider listening on http://").unwrap().trim_end();
        let reply = post(addr.parse().unwrap(), "/v1/completions", &json!({})).await.json();
        stop.cancel();
        reply
    };
    let (served, reply) = tokio::join!(serve(command.args, writer, stop.clone()), client);
    served.unwrap();
    assert_eq!(reply["choices"][0]["text"], "hi");
}
