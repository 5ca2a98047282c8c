//! `cogni-gateway run`: one run in a sandbox, with its gateway in this process.

use std::env;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{ArgMatches, Command, FromArgMatches, ValueEnum};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::flags;
use crate::config::{Config, SETTINGS, Setting};
use crate::observe::access_log::Destination;
use crate::runner::{Order, Prepared, RunResult};
use crate::sandbox::spec::{Access, Limits, Root, Workspace};
use crate::sandbox::{self, RunSpec, embedded};

/// The command and its flags: its own, and one for each setting of the gateway.
pub fn command() -> Command {
    <Args as clap::Args>::augment_args(
        Command::new("run")
            .about("Run one program in a sandbox, with the gateway as its only way out")
            .override_usage("cogni-gateway run [--image IMAGE | --rootfs DIR] [OPTIONS] -- PROGRAM [ARGUMENT]...")
            .after_help(EXAMPLE)
            .args(flags::of(settings())),
    )
}

#[derive(Debug, clap::Args)]
struct Args {
    /// The image, by name or id; it has to be on this machine
    #[arg(long, env = "COGNI_IMAGE")]
    image: Option<String>,

    /// An unpacked root to take instead; with neither, the programs of this machine are taken
    #[arg(long, value_name = "DIR")]
    rootfs: Option<PathBuf>,

    /// Who makes the sandbox
    #[arg(long, value_enum, default_value_t = Driver::Auto, env = "COGNI_DRIVER")]
    driver: Driver,

    /// Let the embedded driver do without limits on memory, processes and processors, where it may not set them
    #[arg(long)]
    allow_unlimited: bool,

    /// What stands at /workspace, and whether the program may write there; `ro` where nothing is said
    #[arg(long, value_name = "DIR[:ro|rw|none]")]
    workspace: Option<String>,

    /// The workspace and the root have to be below one of these [default: the current directory]
    #[arg(long, value_name = "DIR")]
    root: Vec<PathBuf>,

    /// A variable for the program
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,

    /// When the sandbox is ended
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = humantime::parse_duration)]
    max_runtime: Duration,

    /// Memory, files in memory included
    #[arg(long, value_name = "SIZE", default_value = "512m", value_parser = size)]
    max_memory: u64,

    /// Processes and threads
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().pids)]
    pids: u32,

    /// Processors
    #[arg(long, value_name = "COUNT", default_value_t = Limits::default().cpus)]
    cpus: f64,

    /// What the result keeps of each of stdout and stderr
    #[arg(long, value_name = "SIZE", default_value = "1m", value_parser = size)]
    max_output: u64,

    /// Between SIGTERM and SIGKILL
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = humantime::parse_duration)]
    grace: Duration,

    /// The sandbox's first process, or `none` [default: cogni-init beside this program]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    #[command(flatten)]
    places: Places,

    /// The program and its arguments, executed as they stand
    #[arg(last = true, required = true)]
    argv: Vec<String>,
}

/// Where sandboxes are made, and their runs have their directories.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Places {
    /// Docker Engine's socket
    #[arg(
        long,
        value_name = "PATH",
        env = "COGNI_DOCKER_SOCKET",
        default_value = "/var/run/docker.sock"
    )]
    pub(super) docker_socket: PathBuf,

    /// Where runs have their directories
    #[arg(long, value_name = "DIR", env = "COGNI_RUN_DIR", default_value = "/run/cogni")]
    pub(super) run_dir: PathBuf,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Driver {
    /// Docker Engine where there is an image, else we ourselves
    Auto,
    /// Docker Engine
    Docker,
    /// We ourselves, with nothing else installed
    Embedded,
}

/// Prints the result, and says by the exit status whether it is ok: 0 it is, 1 it is not.
pub fn run(matches: &ArgMatches, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let order = order(matches, |name| env::var(name).ok())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let sweep = order.sweep();
        let ended = CancellationToken::new();
        let run = async {
            let _ended = ended.clone().drop_guard();
            let result = until_signalled(order).await?;
            serde_json::to_writer(&mut *out, &result)?;
            writeln!(out)?;
            Ok(if result.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        };
        // Beside the run, which it must not hold: its result is told before the last sweep is done.
        let (run, ()) = tokio::join!(run, sweep.forever(SWEEP_EVERY, ended.clone()));
        run
    })
}

async fn until_signalled(order: Order) -> anyhow::Result<RunResult> {
    let cancel = CancellationToken::new();
    let cancelled = cancelled()?;
    let prepared = Prepared::new(order)?;
    let mut run = Box::pin(prepared.run(cancel.clone(), stderr()?));
    tokio::select! {
        result = &mut run => Ok(result),
        () = cancelled => {
            cancel.cancel();
            Ok(run.await)
        }
    }
}

/// What the flags, variables and files ask for.
pub fn order(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Order> {
    let args = Args::from_arg_matches(matches)?;
    let config = configure(matches, variable)?;
    let root = root(args.image, args.rootfs)?;
    let Places { docker_socket, run_dir } = args.places;
    let is_docker = match args.driver {
        Driver::Auto => matches!(root, Root::Image(_)),
        Driver::Docker => true,
        Driver::Embedded => false,
    };
    let driver = if is_docker {
        sandbox::Driver::Docker { socket: docker_socket }
    } else {
        sandbox::Driver::Embedded(embedded::Settings {
            may_be_unlimited: args.allow_unlimited,
            ..embedded::Settings::default()
        })
    };
    let here = env::current_dir().context("the current directory is gone")?;
    let spec = RunSpec {
        run: config.identity.run.clone(),
        root,
        argv: args.argv,
        env: args.env.into_iter().collect(),
        limits: Limits {
            max_runtime: args.max_runtime,
            max_memory: args.max_memory,
            pids: args.pids,
            cpus: args.cpus,
            max_output_bytes: usize::try_from(args.max_output)?,
        },
        workspace: args.workspace.as_deref().map_or(Ok(Workspace::None), workspace)?,
        mounts: vec![],
        volumes: vec![],
        socket_dir: PathBuf::new(),
        init: init(args.init)?,
    };
    let roots = if args.root.is_empty() { vec![here] } else { args.root };
    Ok(Order { config, spec, roots, run_dir, driver, grace: args.grace })
}

/// The gateway's configuration. Standard output is the result's, so the access log is not written there.
fn configure(
    matches: &ArgMatches,
    variable: impl Fn(&str) -> Option<String>,
) -> anyhow::Result<Config> {
    let mut config = flags::read(settings(), matches, variable)?;
    if config.shared.is_some() {
        bail!("`[shared]` is for `cogni-gateway shared`; take it out, or use that command");
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

/// Where the socket is and whose, the runner decides.
fn settings() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().filter(|setting| !setting.name.starts_with("SOCKET_"))
}

fn root(image: Option<String>, rootfs: Option<PathBuf>) -> anyhow::Result<Root> {
    match (image, rootfs) {
        (Some(image), None) => Ok(Root::Image(image)),
        (None, Some(path)) => Ok(Root::Directory(std::path::absolute(path)?)),
        (None, None) => Ok(Root::Host),
        (Some(image), Some(path)) => {
            bail!("the image is `{image}`, the root `{}`; give one of them", path.display())
        }
    }
}

fn workspace(given: &str) -> anyhow::Result<Workspace> {
    let (path, access) = match given.rsplit_once(':') {
        Some((_, "none")) => return Ok(Workspace::None),
        Some((path, "ro")) => (path, Access::ReadOnly),
        Some((path, "rw")) => (path, Access::ReadWrite),
        _ => (given, Access::ReadOnly),
    };
    let path = std::path::absolute(path)
        .with_context(|| format!("`--workspace` is `{given}`; give a directory"))?;
    Ok(Workspace::Directory { path, access })
}

/// `None` is none at all.
fn init(given: Option<PathBuf>) -> anyhow::Result<Option<PathBuf>> {
    if given.as_deref() == Some(Path::new("none")) {
        return Ok(None);
    }
    let path = match given {
        Some(path) => path,
        None => env::current_exe()?.with_file_name("cogni-init"),
    };
    let found = path.canonicalize().ok().filter(|found| found.is_file());
    let found = found.with_context(|| {
        format!(
            "there is no `{}`; say with `--init` where cogni-init is, or `--init none` for an image with a bridge of its own",
            path.display()
        )
    })?;
    Ok(Some(found))
}

/// Ends when somebody asks this process to end.
fn cancelled() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    let mut hangup = signal(SignalKind::hangup())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => (),
            _ = interrupt.recv() => (),
            _ = hangup.recv() => (),
        }
    })
}

/// Standard error as a file, whose writes wait on a thread of their own: the gateway is not held by a terminal.
fn stderr() -> io::Result<tokio::fs::File> {
    Ok(tokio::fs::File::from_std(File::from(io::stderr().as_fd().try_clone_to_owned()?)))
}

fn variable(given: &str) -> Result<(String, String), String> {
    let (name, value) = given.split_once('=').ok_or("give NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// Bytes, or with `k`, `m` or `g` as many KiB, MiB or GiB.
fn size(given: &str) -> Result<u64, String> {
    let (number, shift) = match given.char_indices().last() {
        Some((at, 'k' | 'K')) => (&given[..at], 10),
        Some((at, 'm' | 'M')) => (&given[..at], 20),
        Some((at, 'g' | 'G')) => (&given[..at], 30),
        _ => (given, 0),
    };
    let size = number.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    size.ok_or_else(|| "give a number of bytes, or with k, m or g, such as 512m".to_owned())
}

/// How often a long run looks for what others have left.
const SWEEP_EVERY: Duration = Duration::from_mins(5);

const EXAMPLE: &str = "\
What the program prints is shown on standard error as it comes; standard output has the result, one
JSON object, and nothing else. Exit status: 0 the run was ok, 1 it was not, 2 wrong use.

The gateway's settings are those of `cogni-gateway proxy`, with the same flags and variables.

Example:
  cogni-gateway run --image agent:1 --workspace ./task:rw --max-runtime 5m --max-turns 20 \\
    --billing-account-id acct-1 --litellm-master-key-file /run/secrets/litellm -- python3 /agent.py";
