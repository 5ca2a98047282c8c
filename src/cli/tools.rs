//! `cogni-gateway tools`: pins the tools of the servers of MCP, and compares them with what the servers offer now.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime::Builder;

use crate::base::hidden_characters::is_plain;
use crate::base::regular_file::read_regular_file;
use crate::base::serde_words;
use crate::base::task_group::TaskGroup;
use crate::cli::run::{SandboxPathArgs, resolve_init_binary};
use crate::gateway::config::GatewayConfig;
use crate::runner;
use crate::runner::tool_jobs::SandboxJobRunner;
use crate::service::config::default_state_directory;
use crate::tools::config::ToolConfig;
use crate::tools::mcp_server::lock_file::{ToolLockFile, unusable_reason};
use crate::tools::mcp_server::{McpCommandHost, McpServer};

/// The subcommands of `tools`.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum ToolsCommand {
    /// Ask the servers of `[tools.mcp]` for their tools, and pin them in the file `tools.lock`
    Lock(ToolsConfigArgs),
    /// Show what has changed since then; the exit status is 1 if anything has
    Diff(ToolsConfigArgs),
}

/// The configuration with the servers.
#[derive(Clone, Debug, clap::Args)]
pub struct ToolsConfigArgs {
    /// The TOML file with the table `[tools]`
    #[arg(long, value_name = "FILE", env = "CONFIG")]
    config: PathBuf,

    #[command(flatten)]
    places: SandboxPathArgs,

    /// The first process of a server's sandbox [default: the cogni-init that this program carries]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    /// Let the program of a server run without limits on memory, processes and processors if it may not set them
    #[arg(long)]
    allow_unlimited: bool,
}

/// Runs the command.
pub fn run(command: &ToolsCommand, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let (ToolsCommand::Lock(args) | ToolsCommand::Diff(args)) = command;
    let config = read_tools_table(args)?;
    let path = config.lock.as_deref().context("`tools.lock` is not set; name the file to write")?;
    let pinned = match ToolLockFile::read_file(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            ToolLockFile::new(BTreeMap::new())
        }
        Err(error) => anyhow::bail!("`{}` cannot be read: {error}", path.display()),
    };
    let current = ask_servers(&config, args, out)?;
    let changes = pinned.list_changes(&current);
    for change in &changes {
        writeln!(out, "{change}")?;
    }
    match command {
        ToolsCommand::Lock(_) => {
            current.write_file(path).with_context(|| format!("`{}`", path.display()))?;
            writeln!(out, "{} changes are pinned in {}", changes.len(), path.display())?;
            Ok(ExitCode::SUCCESS)
        }
        ToolsCommand::Diff(_) if changes.is_empty() => {
            writeln!(out, "the servers offer what {} pins", path.display())?;
            Ok(ExitCode::SUCCESS)
        }
        ToolsCommand::Diff(_) => Ok(ExitCode::FAILURE),
    }
}

/// Reads the table `[tools]` alone: the rest of the file may need what the lock file is missing.
fn read_tools_table(args: &ToolsConfigArgs) -> anyhow::Result<ToolConfig> {
    let shown = args.config.display();
    let text = read_regular_file(&args.config, GatewayConfig::MAX_FILE_BYTES)
        .with_context(|| format!("`{shown}`"))?;
    let file: toml::Table =
        serde_words::from_toml(&text).map_err(|problem| anyhow::anyhow!("`{shown}`: {problem}"))?;
    let tools = file.get("tools").and_then(toml::Value::as_table);
    let tools = tools.with_context(|| format!("`{shown}` has no table `[tools]`"))?;
    let config = ToolConfig::from_table(tools).with_context(|| format!("`{shown}`"))?;
    anyhow::ensure!(!config.mcp.is_empty(), "`{shown}` has no servers in `[tools.mcp]`");
    Ok(config)
}

/// Returns what the servers offer, and prints which of their tools cannot be granted.
fn ask_servers(
    config: &ToolConfig,
    args: &ToolsConfigArgs,
    out: &mut impl Write,
) -> anyhow::Result<ToolLockFile> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let tasks = TaskGroup::default();
    let has_programs = config.mcp.values().any(|server| !server.command.is_empty());
    let host = has_programs.then(|| open_host(args, &tasks)).transpose()?;
    let mut servers = BTreeMap::new();
    for (name, config) in &config.mcp {
        let server = McpServer::new(name, config, &Arc::default(), host.as_ref())?;
        let tools = runtime.block_on(async {
            let tools = server.list_tools().await;
            // The drop stops the server's program.
            drop(server);
            tools
        });
        let tools = tools.with_context(|| format!("the server `{name}`"))?;
        for (tool, definition) in &tools {
            // JSON escapes line ends and tabs, so the rest is what a reader of the file does not see and a model does.
            if definition.to_string().chars().any(|letter| !is_plain(letter)) {
                let tool = tool.escape_debug();
                writeln!(out, "! {name}__{tool}: its definition has characters that do not show")?;
            }
            if let Some(reason) = unusable_reason(name, tool, definition) {
                writeln!(out, "! {name}__{}: cannot be granted: {reason}", tool.escape_debug())?;
            }
        }
        servers.insert(name.clone(), tools);
    }
    runtime.block_on(tasks.shut_down(STOP_GRACE));
    Ok(ToolLockFile::new(servers))
}

/// Opens the place for the programs of servers. They get no workspace, because there is no run.
fn open_host(args: &ToolsConfigArgs, tasks: &TaskGroup) -> anyhow::Result<McpCommandHost> {
    let SandboxPathArgs { docker_socket, run_dir } = args.places.clone();
    runner::check_run_dir(&run_dir)?;
    let init = resolve_init_binary(args.init.clone(), default_state_directory())?.install_file()?;
    let may_be_unlimited = args.allow_unlimited;
    let jobs = SandboxJobRunner::without_run(run_dir, docker_socket, init, may_be_unlimited);
    Ok(McpCommandHost { jobs: Arc::new(jobs), tasks: tasks.clone() })
}

/// The time that the program of a server has for its end. Our choice: the sandbox has a second.
const STOP_GRACE: Duration = Duration::from_secs(10);
