//! `cogni-gateway run`: one run in a sandbox, with its gateway in this process.

mod help;
mod progress;
mod repository;
pub mod shown;

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
use progress::Follower;
use shown::{Place, Shown};

use super::relay::Keys;
use super::{WRONG_USE, flags, without_values};
use crate::catalog::{Catalog, Stream};
use crate::config::{Admin, Config, SETTINGS, Setting};
use crate::observe::access_log::Destination;
use crate::runner::delivery::Relayed;
use crate::runner::{
    self, ErrorCode, Host, Llm, MODEL, Maker, Order, Prepared, Reins, Request, RunResult,
};
use crate::sandbox::output::Output;
use crate::sandbox::spec::{Access, Size, Wanted, Workspace};
use crate::sandbox::{First, UserRange};
use repository::Asked;

/// The command and its flags: its own, and one for each setting of the gateway.
pub fn command() -> Command {
    Command::new("run").about(ABOUT).defer(arguments)
}

fn arguments(command: Command) -> Command {
    let command = command.override_usage(USAGE).after_help(EXAMPLE);
    // What a newcomer needs first comes first.
    let mut gateway: Vec<_> = flags::of(settings()).collect();
    gateway.sort_by_key(|arg| help::rank(arg.get_id().as_str()));
    let command = <Args as clap::Args>::augment_args(command).args(gateway);
    without_values(command)
        .about(ABOUT)
        .mut_args(|arg| match section(arg.get_id().as_str()) {
            Some(section) => arg.help_heading(section),
            None => arg,
        })
        .mut_arg("RUN_ID", |arg| arg.help("The run's id [default: a new one] [env: RUN_ID]"))
        .mut_arg("ACCESS_LOG_PATH", |arg| {
            arg.help("The access log, a file [default: off] [env: ACCESS_LOG_PATH]")
        })
        .mut_arg("DRAIN_TIMEOUT_SECONDS", |arg| arg.help(flags::AFTER_THE_END))
}

#[derive(Debug, clap::Args)]
struct Args {
    /// A file that says what to run; what is given beside it wins
    #[arg(long, value_name = "FILE")]
    spec: Option<PathBuf>,

    /// An agent of the catalog, in place of a program: `cogni-gateway agents` lists them
    #[arg(long, value_name = "NAME", conflicts_with = "argv")]
    agent: Option<String>,

    #[command(flatten)]
    agents: Agents,

    /// What the agent is to answer; `-` reads it from standard input
    #[arg(long, value_name = "TEXT")]
    message: Option<String>,

    /// The model's name; the program finds it in `COGNI_MODEL`
    #[arg(long, value_name = "NAME", env = MODEL)]
    model: Option<String>,

    /// The image, by name or id; it has to be on this machine
    #[arg(long, env = "COGNI_IMAGE")]
    image: Option<String>,

    /// An unpacked root to take instead; with neither, the programs of this machine are taken
    #[arg(long, value_name = "DIR")]
    rootfs: Option<PathBuf>,

    /// Who makes the sandbox: `docker`, `embedded`, which needs nothing else installed, or `auto`, which is Docker where
    /// there is an image [default: auto]
    #[arg(long, value_name = "DRIVER", env = "COGNI_DRIVER")]
    driver: Option<Maker>,

    #[command(flatten)]
    proxy: ProxyArgs,

    /// Let the embedded driver do without limits on memory, processes and processors, where it may not set them
    #[arg(long)]
    allow_unlimited: bool,

    /// What stands at /workspace, and whether the program may write there, `ro` where nothing is said; `none` for nothing
    #[arg(long, value_name = "DIR[:ro|rw|none]")]
    workspace: Option<String>,

    /// The workspace and the root have to be below one of these [default: the current directory]
    #[arg(long, value_name = "DIR")]
    root: Vec<PathBuf>,

    /// A variable for the program
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,

    /// When the sandbox is ended [default: 10m]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::time)]
    max_runtime: Option<Duration>,

    /// Memory, files in memory included [default: 512m]
    #[arg(long, value_name = "SIZE")]
    max_memory: Option<Size>,

    /// Processes and threads [default: 256]
    #[arg(long, value_name = "COUNT", value_parser = flags::count::<u32>)]
    pids: Option<u32>,

    /// Processors [default: 1]
    #[arg(long, value_name = "COUNT", value_parser = flags::processors)]
    cpus: Option<f64>,

    /// What the result keeps of each of stdout and stderr [default: 1m]
    #[arg(long, value_name = "SIZE")]
    max_output: Option<Size>,

    /// What a workspace may hold that is made for the run [default: 4g]
    #[arg(long, value_name = "SIZE")]
    max_workspace: Option<Size>,

    /// Between SIGTERM and SIGKILL [default: 10s]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::time)]
    grace: Option<Duration>,

    /// The sandbox's first process, or `none` [default: the cogni-init that this program carries]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    /// A few lines on how it goes, on standard error, in place of the log
    #[arg(long, value_name = "WHEN", value_enum, default_value_t = When::Auto)]
    progress: When,

    /// The users of this machine that sandboxes run as, each its own; one number is one user for all
    #[arg(long, value_name = "FIRST-LAST", env = "COGNI_UIDS", default_value_t)]
    uids: UserRange,

    /// The user of this machine that the sandbox runs as, such as the owner of a workspace to write [default: one of `--uids`]
    #[arg(long, value_name = "UID", value_parser = user, conflicts_with = "uids")]
    uid: Option<UserRange>,

    #[command(flatten)]
    places: Places,

    #[command(flatten)]
    repository: repository::Args,

    /// The program and its arguments, executed as they stand
    #[arg(last = true)]
    argv: Vec<String>,
}

/// Which agents there are.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Agents {
    /// The catalog: a directory with a file for each agent [default: the agents that this program brings along]
    #[arg(long, value_name = "DIR", env = "COGNI_AGENTS_DIR")]
    agents_dir: Option<PathBuf>,
}

impl Agents {
    pub(super) fn catalog(&self) -> anyhow::Result<Catalog> {
        self.catalog_of(None)
    }

    /// The catalog, by a directory that a file names where no other is given.
    pub(super) fn catalog_of(&self, in_file: Option<PathBuf>) -> anyhow::Result<Catalog> {
        match self.agents_dir.clone().or(in_file) {
            Some(directory) => Ok(Catalog::load(&directory)?),
            None => Ok(Catalog::builtin()),
        }
    }
}

/// Where sandboxes are made, and their runs have their directories.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Places {
    /// Docker Engine's socket, or Podman's [default: where Docker's own command line looks]
    #[arg(
        long,
        value_name = "PATH",
        env = "COGNI_DOCKER_SOCKET",
        default_value_os_t = docker_socket(),
        hide_default_value = true
    )]
    pub(super) docker_socket: PathBuf,

    /// Where runs have their directories
    #[arg(long, value_name = "DIR", env = "COGNI_RUN_DIR", default_value = "/run/cogni")]
    pub(super) run_dir: PathBuf,
}

/// Who serves the gateway.
#[derive(Clone, Debug, clap::Args)]
struct ProxyArgs {
    /// Who serves the gateway
    #[arg(long, value_enum, default_value_t = Proxy::Process, env = "COGNI_PROXY")]
    proxy: Proxy,

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
enum Proxy {
    /// This process
    Process,
    /// A container of Docker Engine's, which alone has the upstream's key
    Container,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum When {
    /// Where standard error is a terminal
    #[default]
    Auto,
    Always,
    Never,
}

impl When {
    fn is_now(self) -> bool {
        self == Self::Always || self == Self::Auto && io::stderr().is_terminal()
    }
}

/// Prints the result, and says by the exit status whether it is ok: 0 it is, 1 it is not, 3 it is, and its work is not
/// delivered.
pub fn run(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let (mut order, asked) = asked(matches, |name| env::var(name).ok())?;
    runner::check_run_dir(&order.run_dir)?;
    let progress = matches.get_one("progress").copied().unwrap_or_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let done = runtime.block_on(async {
        let sweep = order.sweep();
        let ended = CancellationToken::new();
        let run = async {
            let _ended = ended.clone().drop_guard();
            let skipped = matches!(asked, Asked::Skipped).then(Relayed::skipped);
            if let Asked::Branch(branch) = asked {
                let agent = order.agent.as_ref().map(|agent| &*agent.entry);
                let keys = Keys::of(&order.config);
                order.target = Some(Box::pin(branch.target(agent, keys)).await?);
            }
            let mut result = Box::pin(until_signalled(order, progress)).await?;
            result.relay = result.relay.or(skipped);
            // The run has been, and nothing was wrong about how it was asked for.
            if let Err(error) = tell(&result, out) {
                tracing::error!(run = result.run_id, %error, "the result cannot be written");
                return Ok(ExitCode::FAILURE);
            }
            let is_delivered = result.relay.as_ref().is_none_or(Relayed::is_well);
            Ok(match (result.ok, is_delivered) {
                (true, true) => ExitCode::SUCCESS,
                (true, false) => ExitCode::from(UNDELIVERED),
                (false, _) if result.error_code.is_some_and(ErrorCode::is_before_start) => {
                    ExitCode::from(WRONG_USE)
                }
                (false, _) => ExitCode::FAILURE,
            })
        };
        // Beside the run, which it must not hold: its result is told before the last sweep is done.
        let (run, ()) = tokio::join!(run, sweep.forever(SWEEP_EVERY, ended.clone()));
        run
    });
    // What is still being shown may wait for somebody who does not look.
    runtime.shutdown_background();
    done
}

fn tell(result: &RunResult, out: &mut impl Write) -> io::Result<()> {
    serde_json::to_writer(&mut *out, result)?;
    writeln!(out)?;
    out.flush()
}

async fn until_signalled(order: Order, progress: When) -> anyhow::Result<RunResult> {
    let is_shown = progress.is_now();
    let is_told = order.agent.as_ref().is_some_and(|agent| agent.entry.stream == Stream::Events);
    let signals = Signals::listen()?;
    let beginning = progress::beginning(&order);
    let prepared = Prepared::new(order)?;
    let place = Place::default();
    if !is_shown {
        let live = stderr()?;
        // A file is given every byte, a terminal none that it would obey.
        return Ok(if io::stderr().is_terminal() {
            until(prepared, Shown::text(live, place), signals).await
        } else {
            until(prepared, live, signals).await
        });
    }
    let mut follower = Follower::new(prepared.ledger(), stderr()?, place.clone());
    follower.write(&beginning).await;
    let live = stderr()?;
    let shown = if is_told { Shown::events(live, place) } else { Shown::text(live, place) };
    let result = tokio::select! {
        result = Box::pin(until(prepared, shown, signals)) => result,
        never = follower.follow() => match never {},
    };
    follower.tell().await;
    follower.write(&progress::ending(&result)).await;
    Ok(result)
}

/// Runs to the end. Whoever asks for it is given that with the program's grace, and whoever asks twice at once; what is on
/// its way to a branch by then is left to `relay retry`.
async fn until(
    prepared: Prepared,
    live: impl AsyncWrite + Unpin,
    mut signals: Signals,
) -> RunResult {
    let (cancel, leave) = (CancellationToken::new(), CancellationToken::new());
    let hurry = prepared.hurry();
    let output = Output::new(prepared.max_output_bytes(), live);
    let reins = Reins { cancel: cancel.clone(), leave: leave.clone(), answered: None };
    let run = Box::pin(prepared.run_into(output, reins));
    let asked = async {
        signals.next().await;
        cancel.cancel();
        signals.next().await;
        hurry.cancel();
        leave.cancel();
        pending::<Infallible>().await
    };
    tokio::select! {
        result = run => result,
        never = asked => match never {},
    }
}

/// Whether progress is shown, in place of this process's own log.
pub fn shows_progress(matches: &ArgMatches) -> bool {
    matches.get_one("progress").is_some_and(|when: &When| when.is_now())
}

/// What the flags, variables and files ask for.
pub fn order(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Order> {
    asked(matches, variable).map(|(order, _)| order)
}

fn asked(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<(Order, Asked)> {
    let args = Args::from_arg_matches(matches)?;
    let proxy = match args.proxy.proxy {
        Proxy::Process => None,
        Proxy::Container => Some(runner::proxy::Settings {
            docker_socket: args.places.docker_socket.clone(),
            image: args.proxy.proxy_image.clone(),
            network: args.proxy.proxy_network.clone(),
            given: flags::given(settings(), matches, &variable)?,
            config_file: flags::config_file(matches, &variable).map(PathBuf::from),
        }),
    };
    let file = args.spec.as_deref().map(Request::read).transpose()?.unwrap_or_default();
    let (repository, given) = (args.repository.clone(), args.init.clone());
    let uids = args.uid.unwrap_or(args.uids);
    let Places { docker_socket, run_dir } = args.places.clone();
    let catalog = args.agents.catalog()?;
    let request = args.request()?.over(file);
    let init = init(given, repository.state_dir())?;
    let host = Host { docker_socket, run_dir, init, uids };
    let mut config = configure(matches, variable, &request)?;
    config.files.extend(repository.private());
    let asked = repository.asked(&config.identity.run)?;
    if proxy.is_some() && !matches!(asked, Asked::Nothing) {
        bail!("a run with a repository needs its gateway in this process; leave `--proxy` out");
    }
    let order = Order { proxy, ..request.order(config, host, &catalog)? };
    // The agent would be paid for work in a workspace that has nothing of the repository in it.
    if matches!(asked, Asked::Skipped)
        && matches!(order.spec.workspace, Workspace::None | Workspace::Fresh)
    {
        bail!(
            "`--repo` is given without a key for its branch, and without it the workspace would stay empty; name the \
             branch with `--branch-key KEY` or `--work-item KEY`, or give the files with `--workspace DIR`"
        );
    }
    Ok((order, asked))
}

impl Args {
    fn request(self) -> anyhow::Result<Request> {
        Ok(Request {
            agent: self.agent,
            message: self.message.map(message).transpose()?,
            driver: self.driver,
            allow_unlimited: self.allow_unlimited.then_some(true),
            image: self.image,
            rootfs: self.rootfs,
            argv: self.argv,
            env: self.env.into_iter().collect(),
            limits: Wanted {
                max_runtime: self.max_runtime,
                max_memory: self.max_memory,
                pids: self.pids,
                cpus: self.cpus,
                max_output: self.max_output,
                max_workspace: self.max_workspace,
            },
            workspace: self.workspace.as_deref().map(workspace),
            roots: self.root,
            grace: self.grace,
            llm: Llm { model: self.model, ..Llm::default() },
            ..Request::default()
        })
    }
}

/// The gateway's configuration. Standard output is the result's, so the access log is not written there.
fn configure(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
    request: &Request,
) -> anyhow::Result<Config> {
    let told = |config: &mut Config| request.configure(config);
    let mut config = flags::read_with(settings(), matches, variable, told)?;
    if config.shared.is_some() {
        bail!("`[shared]` is for `cogni-gateway shared`; take it out, or use that command");
    }
    if config.admin != Admin::default() {
        bail!(
            "`[admin]` is for `cogni-gateway proxy` and `cogni-gateway shared`; take it out: a signal ends this run"
        );
    }
    if config.identity.run.is_empty() {
        config.identity.run = format!("run-{}", Uuid::now_v7());
    }
    if config.access_log == Destination::Stdout {
        config.access_log = Destination::Off;
    }
    config.check()?;
    Ok(config)
}

/// Where the socket is and whose, the runner decides; and whoever runs it can end it.
fn settings() -> impl Iterator<Item = &'static Setting> {
    let is_here =
        |setting: &&Setting| !setting.name.starts_with("SOCKET_") && !setting.is_of_its_operator();
    SETTINGS.iter().filter(is_here)
}

/// Where Docker's own command line would look, as far as that is a socket of this machine.
fn docker_socket() -> PathBuf {
    let host = env::var("DOCKER_HOST").unwrap_or_default();
    host.strip_prefix("unix://").unwrap_or("/var/run/docker.sock").into()
}

fn workspace(given: &str) -> Workspace {
    let (path, access) = match given.rsplit_once(':') {
        None if given == "none" => return Workspace::None,
        Some((_, "none")) => return Workspace::None,
        Some((path, "ro")) => (path, Access::ReadOnly),
        Some((path, "rw")) => (path, Access::ReadWrite),
        _ => (given, Access::ReadOnly),
    };
    Workspace::Directory { path: path.into(), access }
}

fn message(given: String) -> anyhow::Result<String> {
    if given != "-" {
        return Ok(given);
    }
    io::read_to_string(io::stdin()).context("the message cannot be read from standard input")
}

/// Returns the first process of sandboxes: the file that the operator has named, or the built-in one, which is written to the
/// state directory.
pub(super) fn init(given: Option<PathBuf>, state_dir: PathBuf) -> anyhow::Result<First> {
    let Some(path) = given else { return Ok(First::BuiltIn { directory: state_dir }) };
    if path == Path::new("none") {
        return Ok(First::None);
    }
    let found = path.canonicalize().ok().filter(|found| found.is_file());
    let found = found.with_context(|| {
        format!(
            "there is no `{}`; leave `--init` out for the cogni-init that this program carries, or say `--init none` for an image with a bridge of its own",
            path.display()
        )
    })?;
    Ok(First::Given(found))
}

/// How this process is asked to end.
struct Signals([Signal; 3]);

impl Signals {
    fn listen() -> io::Result<Self> {
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

/// Standard error as a file, whose writes wait on a thread of their own: the gateway is not held by a terminal.
fn stderr() -> io::Result<tokio::fs::File> {
    Ok(tokio::fs::File::from_std(File::from(io::stderr().as_fd().try_clone_to_owned()?)))
}

fn user(given: &str) -> Result<UserRange, &'static str> {
    let user = given.parse().ok().filter(|range: &UserRange| range.single().is_some());
    user.ok_or("give the number of one user, from 1 to 2147483647, such as 1000")
}

fn variable(given: &str) -> Result<(String, String), String> {
    let (name, value) = given.split_once('=').ok_or("give NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// 2 is for what could not begin.
const UNDELIVERED: u8 = 3;

/// How often a long run looks for what others have left.
const SWEEP_EVERY: Duration = Duration::from_mins(5);
