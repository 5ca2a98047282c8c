//! `cogni-gateway run`: one run in a sandbox, with its gateway in this process or in a container.

mod help;
pub mod output_renderer;
mod progress;
mod repository;
mod value_parsers;

use std::convert::Infallible;
use std::env;
use std::fs::File;
use std::future::pending;
use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{ArgMatches, Command, FromArgMatches, ValueEnum};
use tokio::io::AsyncWrite;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use help::{ABOUT, EXAMPLE, USAGE, section};
use output_renderer::{OpenLineFlag, OutputRenderer};
use progress::ProgressPrinter;

use super::{EXIT_USAGE, flags, hide_env_values};
use crate::base::regular_file::read_within;
use crate::gateway::config::{AdminConfig, ConfigSetting, GatewayConfig, SETTINGS};
use crate::runner::agents::{AgentCatalog, AgentStreamFormat};
use crate::runner::branch_delivery::DeliveryReport;
use crate::runner::gateway_container::GatewayContainerConfig;
use crate::runner::{
    self, DriverChoice, GatewayOverrides, GatewayServer, HostEnvironment, MAX_REQUEST_BYTES,
    MODEL_VARIABLE, PreparedRun, RunErrorCode, RunHandles, RunInputs, RunPlan, RunRequest,
    RunResult,
};
use crate::sandbox::output::OutputCapture;
use crate::sandbox::spec::{ByteSize, LimitOverrides, MountAccess, WorkspaceMount};
use crate::sandbox::{InitBinary, UserRange};
use crate::service::config::default_run_directory;
use crate::telemetry::access_log::AccessLogDestination;
use repository::{RunRepositoryArgs, acquire_with_signals};
use value_parsers::{explain_missing_dashes, parse_single_user, parse_variable};

/// Builds the command: its own flags, and one flag for each setting of the gateway.
pub fn command() -> Command {
    Command::new("run").about(ABOUT).defer(add_arguments)
}

fn add_arguments(command: Command) -> Command {
    let command = command.override_usage(USAGE).after_help(EXAMPLE);
    // The flags that a new user needs first come first.
    let mut gateway: Vec<_> = flags::flags_for(run_settings()).collect();
    gateway.sort_by_key(|arg| help::rank(arg.get_id().as_str()));
    let command = <RunArgs as clap::Args>::augment_args(command).args(gateway);
    hide_env_values(command)
        .about(ABOUT)
        .mut_args(|arg| match section(arg.get_id().as_str()) {
            Some(section) => arg.help_heading(section),
            None => arg,
        })
        .mut_arg("RUN_ID", |arg| arg.help("The run's id [default: a new one] [env: RUN_ID]"))
        .mut_arg("ACCESS_LOG_PATH", |arg| {
            arg.help("The access log, a file [default: off] [env: ACCESS_LOG_PATH]")
        })
        .mut_arg("DRAIN_TIMEOUT_SECONDS", |arg| arg.help(flags::DRAIN_TIMEOUT_HELP))
}

/// The flags of `run`.
#[derive(Debug, clap::Args)]
struct RunArgs {
    /// File that describes the run; flags override its settings
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,

    /// Agent of the catalog, in place of a program; see `cogni-gateway agents`
    #[arg(long, value_name = "NAME", conflicts_with = "argv")]
    agent: Option<String>,

    #[command(flatten)]
    agents: AgentsDirArgs,

    /// Message for the agent; `-` reads it from standard input
    #[arg(long, value_name = "TEXT")]
    message: Option<String>,

    /// The model's name; the program finds it in `COGNI_MODEL`
    #[arg(long, value_name = "NAME", env = MODEL_VARIABLE)]
    model: Option<String>,

    /// Image, by name or id; it must be on this machine
    #[arg(long, env = "COGNI_IMAGE")]
    image: Option<String>,

    /// Unpacked root directory; without image and root, the programs of this machine are used
    #[arg(long, value_name = "DIR")]
    rootfs: Option<PathBuf>,

    /// Driver of the sandbox: `docker`, `embedded`, which needs nothing else installed, or `auto`, which is Docker if
    /// there is an image [default: auto]
    #[arg(long, value_name = "DRIVER", env = "COGNI_DRIVER")]
    driver: Option<DriverChoice>,

    #[command(flatten)]
    proxy: GatewayPlacementArgs,

    /// Let the embedded driver run without limits on memory, processes and processors if it may not set them
    #[arg(long)]
    allow_unlimited: bool,

    /// Directory to mount at /workspace, read-only unless `:rw` is given; `none` mounts nothing
    #[arg(long, value_name = "DIR[:ro|rw|none]")]
    workspace: Option<String>,

    /// Directory that workspace and root must be below [default: the current directory]
    #[arg(long, value_name = "DIR")]
    root: Vec<PathBuf>,

    /// Variable for the program
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_variable)]
    env: Vec<(String, String)>,

    /// Time after which the sandbox is ended [default: 10m]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::parse_duration)]
    max_runtime: Option<Duration>,

    /// Memory, files in memory included [default: 512m]
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<ByteSize>,

    /// Processes and threads [default: 256]
    #[arg(long, value_name = "COUNT", value_parser = flags::count::<u32>)]
    pids: Option<u32>,

    /// Processors [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = flags::processors)]
    cpus: Option<f64>,

    /// Bytes of stdout, and of stderr, that the result contains [default: 1m]
    #[arg(long, value_name = "SIZE")]
    max_output: Option<ByteSize>,

    /// Maximum size of a workspace that is made for the run [default: 4g]
    #[arg(long, value_name = "SIZE")]
    max_workspace: Option<ByteSize>,

    /// Time between SIGTERM and SIGKILL [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::parse_duration)]
    grace: Option<Duration>,

    /// The sandbox's first process, or `none` [default: the cogni-init that this program carries]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    /// Show a few lines of progress on standard error, in place of the log
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = ProgressMode::Auto)]
    progress: ProgressMode,

    /// Users of this machine for the sandboxes, one for each; a single number is one user for all
    #[arg(long, value_name = "FIRST-LAST", env = "COGNI_UIDS", default_value_t)]
    uids: UserRange,

    /// User of this machine for the sandbox, such as the owner of a writable workspace [default: one of `--uids`]
    #[arg(long, value_name = "UID", value_parser = parse_single_user, conflicts_with = "uids")]
    uid: Option<UserRange>,

    #[command(flatten)]
    places: SandboxPathArgs,

    #[command(flatten)]
    repository: RunRepositoryArgs,

    /// A word before `--`. It exists only for its error.
    #[arg(hide = true, value_name = "WORD", value_parser = explain_missing_dashes)]
    _misplaced: Option<String>,

    /// The program and its arguments, passed on without interpretation
    #[arg(last = true)]
    argv: Vec<String>,
}

/// The flag for the agents' catalog.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct AgentsDirArgs {
    /// Catalog: a directory with a file for each agent [default: the built-in agents]
    #[arg(long, value_name = "DIR", env = "COGNI_AGENTS_DIR")]
    agents_dir: Option<PathBuf>,
}

impl AgentsDirArgs {
    pub(super) fn load_catalog(&self) -> anyhow::Result<AgentCatalog> {
        self.catalog_of(None)
    }

    /// Loads the catalog from the flag's directory, from `in_file`, or from the built-in agents, in this order.
    pub(super) fn catalog_of(&self, in_file: Option<PathBuf>) -> anyhow::Result<AgentCatalog> {
        match self.agents_dir.clone().or(in_file) {
            Some(directory) => Ok(AgentCatalog::load_directory(&directory)?),
            None => Ok(AgentCatalog::builtin()),
        }
    }
}

/// The flags for the container engine and the runs' directories.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct SandboxPathArgs {
    /// Docker Engine's socket, or Podman's [default: where Docker's own command line looks]
    #[arg(
        long,
        value_name = "PATH",
        env = "COGNI_DOCKER_SOCKET",
        default_value_os_t = default_docker_socket(),
        hide_default_value = true
    )]
    pub(super) docker_socket: PathBuf,

    /// Directory for the directories of runs [default: /run/cogni, or a user's own runtime directory]
    #[arg(
        long,
        value_name = "DIR",
        env = "COGNI_RUN_DIR",
        default_value_os_t = default_run_directory(),
        hide_default_value = true
    )]
    pub(super) run_dir: PathBuf,
}

/// The flags for the place where the gateway runs.
#[derive(Clone, Debug, clap::Args)]
struct GatewayPlacementArgs {
    /// Place where the gateway runs
    #[arg(long, value_enum, default_value_t = GatewayPlacement::Process, env = "COGNI_PROXY")]
    proxy: GatewayPlacement,

    /// The image of the gateway's container
    #[arg(
        long,
        value_name = "IMAGE",
        default_value = "cogni-gateway:dev",
        env = "COGNI_PROXY_IMAGE"
    )]
    proxy_image: String,

    /// The network of the gateway's container, from which it reaches the upstream
    #[arg(long, value_name = "NETWORK", default_value = "bridge", env = "COGNI_PROXY_NETWORK")]
    proxy_network: String,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum GatewayPlacement {
    /// This process
    Process,
    /// A container of Docker Engine, which alone has the upstream's key
    Container,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum ProgressMode {
    /// Only if standard error is a terminal
    #[default]
    Auto,
    Always,
    Never,
}

impl ProgressMode {
    fn is_enabled(self) -> bool {
        self == Self::Always || self == Self::Auto && io::stderr().is_terminal()
    }
}

/// Runs the program and prints the result. The exit status is 0 if the run is ok, 1 if it is not, and 3 if it is ok but
/// its work is not delivered.
pub fn run(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let (plan, repository) = parse_run(matches, |name| env::var(name).ok())?;
    // The check comes before a branch is leased or a sandbox is started.
    runner::check_run_dir(&plan.run_dir)?;
    let progress = matches.get_one("progress").copied().unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        let mut signals = TerminationSignals::register()?;
        let sweep = plan.leftover_sweeper();
        // Dropping the guard ends the sweeper, also if the run fails early.
        let ended = CancellationToken::new();
        let run = async {
            let _ended = ended.clone().drop_guard();
            let is_skipped = repository.has_repository() && plan.branch.is_none();
            let skipped = is_skipped.then(DeliveryReport::skipped_without_branch);
            let acquired = Box::pin(acquire_with_signals(repository, &plan, &mut signals)).await;
            let mut result = match acquired.transpose()? {
                Some(target) => {
                    let inputs = RunInputs { target, ..RunInputs::default() };
                    Box::pin(run_with_signals(plan, inputs, (signals, progress))).await?
                }
                None => RunResult::cancelled_before_start(plan.spec.run),
            };
            result.relay = result.relay.or(skipped);
            // The run has ended and its request was valid, so that this error is not a usage error.
            if let Err(error) = print_result(&result, out) {
                tracing::error!(run = result.run_id, %error, "the result cannot be written");
                return Ok(ExitCode::FAILURE);
            }
            let is_delivered = result.relay.as_ref().is_none_or(DeliveryReport::is_complete);
            Ok(match (result.ok, is_delivered) {
                (true, true) => ExitCode::SUCCESS,
                (true, false) => ExitCode::from(EXIT_NOT_DELIVERED),
                (false, _) if result.error_code.is_some_and(RunErrorCode::is_before_start) => {
                    ExitCode::from(EXIT_USAGE)
                }
                (false, _) => ExitCode::FAILURE,
            })
        };
        // The sweeper runs beside the run and must not delay it: the result is printed before the last sweep ends.
        let (run, ()) = tokio::join!(run, sweep.run_periodically(SWEEP_INTERVAL, ended.clone()));
        run
    });
    // Output may still wait for a reader that does not read; the process must not wait for it.
    runtime.shutdown_background();
    done
}

fn print_result(result: &RunResult, out: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, result)?;
    writeln!(out)?;
    out.flush()
}

async fn run_with_signals(
    plan: RunPlan,
    inputs: RunInputs,
    (signals, progress): (TerminationSignals, ProgressMode),
) -> anyhow::Result<RunResult> {
    let is_shown = progress.is_enabled();
    let has_events =
        plan.agent.as_ref().is_some_and(|agent| agent.entry.stream == AgentStreamFormat::Events);
    // The line is made here, because `PreparedRun::new` consumes the plan.
    let start_line = progress::start_line(&plan);
    let prepared = PreparedRun::new(plan, inputs)?;
    // Output and progress share the flag, so that a progress line begins at the start of a line.
    let open_line = OpenLineFlag::default();
    if !is_shown {
        let live = open_stderr()?;
        // A file receives every byte; a terminal must not receive bytes that it would interpret.
        return Ok(if io::stderr().is_terminal() {
            run_until_cancelled(prepared, OutputRenderer::for_text(live, open_line), signals).await
        } else {
            run_until_cancelled(prepared, live, signals).await
        });
    }
    let mut follower = ProgressPrinter::new(prepared.ledger(), open_stderr()?, open_line.clone());
    follower.write_lines(&start_line).await;
    let live = open_stderr()?;
    let shown = if has_events {
        OutputRenderer::for_events(live, open_line)
    } else {
        OutputRenderer::for_text(live, open_line)
    };
    let result = tokio::select! {
        result = Box::pin(run_until_cancelled(prepared, shown, signals)) => result,
        never = follower.follow_calls() => match never {},
    };
    // A call may have been settled after the follower was polled for the last time.
    follower.print_new_calls().await;
    follower.write_lines(&progress::end_line(&result)).await;
    Ok(result)
}

/// Runs to completion. The first signal cancels the run within the program's grace period. The second signal kills the
/// program at once and leaves a running delivery to `relay retry`.
async fn run_until_cancelled(
    prepared: PreparedRun,
    live: impl AsyncWrite + Unpin,
    mut signals: TerminationSignals,
) -> RunResult {
    let (cancel, detach) = (CancellationToken::new(), CancellationToken::new());
    let force_kill = prepared.force_kill_token();
    let output = OutputCapture::new(prepared.max_output_bytes(), live);
    let handles =
        RunHandles { cancel: cancel.clone(), detach_delivery: detach.clone(), on_answer: None };
    let run = Box::pin(prepared.run_with_output(output, handles));
    // 1. The first signal cancels. 2. The second one stops waiting. 3. Further signals change nothing.
    let signalled = async {
        signals.next().await;
        cancel.cancel();
        signals.next().await;
        force_kill.cancel();
        detach.cancel();
        pending::<Infallible>().await
    };
    tokio::select! {
        result = run => result,
        never = signalled => match never {},
    }
}

/// Returns true if progress is displayed, in place of this process's log.
pub fn shows_progress(matches: &ArgMatches) -> bool {
    matches.get_one("progress").is_some_and(|when: &ProgressMode| when.is_enabled())
}

/// Builds the plan that the flags, variables and files describe, and returns the repository's flags beside it.
fn parse_run(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<(RunPlan, RunRepositoryArgs)> {
    let args = RunArgs::from_arg_matches(matches)?;
    let gateway = match args.proxy.proxy {
        GatewayPlacement::Process => GatewayServer::OwnProcess,
        GatewayPlacement::Container => GatewayServer::Container(GatewayContainerConfig {
            docker_socket: args.places.docker_socket.clone(),
            image: args.proxy.proxy_image.clone(),
            network: args.proxy.proxy_network.clone(),
            settings: flags::explicit_settings(run_settings(), matches, &variable)?,
            config_file: flags::config_file_path(matches, &variable).map(PathBuf::from),
        }),
    };
    let file = args.spec.as_deref().map(RunRequest::from_file).transpose()?.unwrap_or_default();
    let (repository, given) = (args.repository.clone(), args.init.clone());
    let uids = args.uid.unwrap_or(args.uids);
    let SandboxPathArgs { docker_socket, run_dir } = args.places.clone();
    let catalog = args.agents.load_catalog()?;
    let decisive = [args.agents.agents_dir.clone(), args.spec.clone()];
    // Flags override the file.
    let request = args.into_request()?.with_defaults(file);
    if request.agent.is_none() && request.argv.is_empty() {
        bail!(
            "no program and no agent is given; give a program after `--`, or an agent with `--agent`, `--model` and `--message`"
        );
    }
    let init = resolve_init_binary(given, repository.state_dir())?;
    let host = HostEnvironment { docker_socket, run_dir, init, uids };
    let mut config = load_config(matches, variable, &request)?;
    config.files.extend(repository.private_paths());
    config.decisive_files.extend(decisive.into_iter().flatten());
    let branch = repository.branch_request(&config.identity.run, request.user_text())?;
    if repository.has_repository() && matches!(gateway, GatewayServer::Container(_)) {
        bail!("a run with a repository needs its gateway in this process; leave `--proxy` out");
    }
    let request = RunRequest { branch, ..request };
    let plan = request.resolve((config, gateway), host, &catalog)?;
    // The agent would be paid for work in a workspace without the repository's files.
    if repository.has_repository()
        && plan.branch.is_none()
        && matches!(plan.spec.workspace, WorkspaceMount::None | WorkspaceMount::Fresh)
    {
        bail!(
            "`--repo` is given without a key for its branch, and without it the workspace would stay empty; name the \
             branch with `--branch-key KEY` or `--work-item KEY`, or give the files with `--workspace DIR`"
        );
    }
    Ok((plan, repository))
}

impl RunArgs {
    fn into_request(self) -> anyhow::Result<RunRequest> {
        Ok(RunRequest {
            agent: self.agent,
            message: self.message.map(read_message).transpose()?,
            driver: self.driver,
            allow_unlimited: self.allow_unlimited.then_some(true),
            image: self.image,
            rootfs: self.rootfs,
            argv: self.argv,
            env: self.env.into_iter().collect(),
            limits: LimitOverrides {
                max_runtime: self.max_runtime,
                max_memory: self.max_memory,
                pids: self.pids,
                cpus: self.cpus,
                max_output: self.max_output,
                max_workspace: self.max_workspace,
            },
            workspace: self.workspace.as_deref().map(parse_workspace),
            roots: self.root,
            grace: self.grace,
            llm: GatewayOverrides { model: self.model, ..GatewayOverrides::default() },
            ..RunRequest::default()
        })
    }
}

/// Loads the gateway's configuration. The access log must not go to standard output, which is reserved for the result.
fn load_config(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
    request: &RunRequest,
) -> anyhow::Result<GatewayConfig> {
    let apply_request =
        |config: &mut GatewayConfig| request.llm.apply_to_config(request.run.as_deref(), config);
    let mut config = flags::read_config_with(run_settings(), matches, variable, apply_request)?;
    if config.shared.is_some() {
        bail!("`[shared]` is for `cogni-gateway shared`; take it out, or use that command");
    }
    if config.admin != AdminConfig::default() {
        bail!(
            "`[admin]` is for `cogni-gateway proxy` and `cogni-gateway shared`; take it out: a signal ends this run"
        );
    }
    if config.identity.run.is_empty() {
        // Ids of version 7 sort by time.
        config.identity.run = format!("run-{}", Uuid::now_v7());
    }
    if config.access_log == AccessLogDestination::Stdout {
        config.access_log = AccessLogDestination::Off;
    }
    config.validate()?;
    Ok(config)
}

/// Returns the gateway's settings without those for the socket and the operator: the runner chooses the socket, and the
/// caller can end the run.
fn run_settings() -> impl Iterator<Item = &'static ConfigSetting> {
    let is_here = |setting: &&ConfigSetting| {
        !setting.name.starts_with("SOCKET_") && !setting.is_operator_only()
    };
    SETTINGS.iter().filter(is_here)
}

/// Returns the engine's socket where Docker's command line looks, if that is a unix socket.
fn default_docker_socket() -> PathBuf {
    let host = env::var("DOCKER_HOST").unwrap_or_default();
    host.strip_prefix("unix://").unwrap_or("/var/run/docker.sock").into()
}

fn parse_workspace(given: &str) -> WorkspaceMount {
    // Only the text after the last colon is a mode; every other colon belongs to the path.
    let (path, access) = match given.rsplit_once(':') {
        None if given == "none" => return WorkspaceMount::None,
        Some((_, "none")) => return WorkspaceMount::None,
        Some((path, "ro")) => (path, MountAccess::ReadOnly),
        Some((path, "rw")) => (path, MountAccess::ReadWrite),
        _ => (given, MountAccess::ReadOnly),
    };
    WorkspaceMount::Directory { path: path.into(), access }
}

fn read_message(given: String) -> anyhow::Result<String> {
    if given != "-" {
        return Ok(given);
    }
    let read = read_within(io::stdin().lock(), MAX_REQUEST_BYTES);
    let text = read.and_then(|bytes| String::from_utf8(bytes).map_err(io::Error::other));
    text.context("the message cannot be read from standard input")
}

/// Returns the first process of sandboxes: the file that the operator has named, or the built-in one, which is written
/// to the state directory.
pub(super) fn resolve_init_binary(
    given: Option<PathBuf>,
    state_dir: PathBuf,
) -> anyhow::Result<InitBinary> {
    let Some(path) = given else { return Ok(InitBinary::BuiltIn { directory: state_dir }) };
    if path == Path::new("none") {
        return Ok(InitBinary::None);
    }
    let found = path.canonicalize().ok().filter(|found| found.is_file());
    let found = found.with_context(|| {
        format!(
            "`{}` does not exist; leave `--init` out for the built-in cogni-init, or give `--init none` for an image with its own bridge",
            path.display()
        )
    })?;
    Ok(InitBinary::Configured(found))
}

/// The signals that end this process.
struct TerminationSignals([Signal; 3]);

impl TerminationSignals {
    fn register() -> io::Result<Self> {
        let [terminate, interrupt, hangup] =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()].map(signal);
        Ok(Self([terminate?, interrupt?, hangup?]))
    }

    async fn next(&mut self) {
        let [terminate, interrupt, hangup] = &mut self.0;
        tokio::select! {
            _ = terminate.recv() => (),
            _ = interrupt.recv() => (),
            _ = hangup.recv() => (),
        }
    }
}

/// Opens standard error as a file, whose writes wait on their own thread: a slow terminal never blocks the gateway.
fn open_stderr() -> io::Result<tokio::fs::File> {
    Ok(tokio::fs::File::from_std(File::from(io::stderr().as_fd().try_clone_to_owned()?)))
}

/// The exit status for a run that is ok and whose work is not delivered. 2 is for runs that could not begin.
const EXIT_NOT_DELIVERED: u8 = 3;

/// The interval at which a long run removes leftovers of other runs.
const SWEEP_INTERVAL: Duration = Duration::from_mins(5);
