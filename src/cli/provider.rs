//! `cogni-gateway provider`: a fake model provider that follows a script.

use std::fs::OpenOptions;
use std::io::Write;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::pin::pin;
use std::process::ExitCode;

use anyhow::Context as _;
use clap::Command;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use crate::fakes::model_provider::{FakeProvider, ProviderScript, script};

/// Run a fake model provider for demos, tests and benches.
///
/// The provider answers in the formats of OpenAI and Anthropic, with the headers of LiteLLM. Once it listens it prints
/// one line: `provider listening on http://127.0.0.1:PORT`. On SIGTERM or SIGINT it aborts open connections and ends.
#[derive(Debug, clap::Args)]
#[command(after_long_help = after_help())]
pub struct ProviderArgs {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:0", value_parser = crate::cli::flags::address)]
    pub listen: SocketAddr,

    /// Script for the answers, such as `chunks=100,interval=20ms`; a request may override it in its model's name.
    #[arg(long, value_name = "SCRIPT", default_value = "", hide_default_value = true)]
    pub script: ProviderScript,

    /// Refuse each request that OpenAI or Anthropic would refuse, with their status and error.
    #[arg(long)]
    pub strict: bool,

    /// File to append each request to, as a line of JSON when it has ended.
    #[arg(long, value_name = "FILE")]
    pub record: Option<PathBuf>,
}

pub fn command() -> Command {
    Command::new("provider")
        .about("Run a fake model provider for demos, tests and benches")
        .defer(<ProviderArgs as clap::Args>::augment_args)
}

/// Serves until SIGTERM or SIGINT.
pub fn run(args: ProviderArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let shutdown = CancellationToken::new();
        // The handlers are registered before the address is announced, because a caller may send a signal right after
        // that line.
        let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
        let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
        let mut serving = pin!(serve(args, out, shutdown.clone()));
        tokio::select! {
            served = &mut serving => return served,
            _ = terminate.recv() => (),
            _ = interrupt.recv() => (),
        }
        // The server closes its connections before the process ends.
        shutdown.cancel();
        serving.await
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Prints its address to `out`, and serves until `shutdown`.
pub async fn serve(
    args: ProviderArgs,
    mut out: impl Write,
    shutdown: CancellationToken,
) -> anyhow::Result<()> {
    let bound = if args.strict {
        FakeProvider::bind_strict(args.listen, args.script).await
    } else {
        FakeProvider::bind(args.listen, args.script).await
    };
    let provider = bound.with_context(|| format!("cannot listen on `{}`", args.listen))?;
    if let Some(path) = args.record {
        let file = OpenOptions::new().create(true).append(true).open(&path);
        provider.record_requests_to(
            file.with_context(|| format!("cannot write `{}`", path.display()))?,
        );
    }
    writeln!(out, "provider listening on http://{}", provider.addr())
        // A waiting caller needs the address at once.
        .and_then(|()| out.flush())
        .context("cannot announce the address")?;
    provider.serve(shutdown).await;
    Ok(())
}

fn after_help() -> String {
    format!(
        "\
A script is `name=value`, separated by commas (or semicolons):

{}
As in `chunks=100,interval=20ms,fault=reset@3`. A request sets options of its own in its model's
name: `\"model\": \"fake/chunks=100\"`.

Beside the models' routes there are `GET /health`, `GET /_seen?last=N` (what reached the provider),
`DELETE /_seen` (forget it) and `POST /_gate` (let one waiting answer go on).",
        script::options_help()
    )
}
