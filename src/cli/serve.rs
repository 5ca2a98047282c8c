//! `cogni-gateway serve`: agents, chats, runs and what they cost, as a service over HTTP.

mod given;
mod reload;

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::{ArgMatches, Command};
use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::relay::Keys;
use super::{flags, without_values};
use crate::api::{Api, Limits, Listener, Proofs, Shares, Turns};
use crate::app::{self, Seats, ServerSignals};
use crate::base::db::Database;
use crate::base::drain::Drain;
use crate::base::private_dir;
use crate::billing::{self, Books};
use crate::catalog::available::{Availability, MAX_AGE, Machine};
use crate::config::{SETTINGS, Setting};
use crate::delivery::{Error, Relay};
use crate::git;
use crate::grant::{self, Grants};
use crate::journal::{self, Journal};
use crate::relay;
use crate::runner;
use crate::supervisor::{Lock, Parts, Settings, Supervisor};

pub use given::Given;

use reload::{Bookkeeper, Reload};

/// The command and its flags: its own, and one for each setting that is not about one run.
pub fn command() -> Command {
    Command::new("serve").about(ABOUT).defer(arguments)
}

fn arguments(command: Command) -> Command {
    // The words about it come last: flags that are put in bring their own.
    let command = given::augment(command.after_help(EXAMPLE).args(flags::of(settings())));
    without_values(command)
        .about(ABOUT)
        .mut_arg("DRAIN_TIMEOUT_SECONDS", |arg| arg.help(flags::AFTER_THE_END))
}

/// Serves until SIGTERM, SIGINT or SIGQUIT, then lets runs end.
pub fn run(matches: &ArgMatches) -> anyhow::Result<ExitCode> {
    flags::check_environment()?;
    let matches = matches.clone();
    let read = move || Given::read(&matches, |name| std::env::var(name).ok());
    let given = read()?;
    app::descriptors::raise();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let served = runtime.block_on(Box::pin(serve(given, read)));
    // What git is still at is in the outbox.
    runtime.shutdown_timeout(LAST_WORDS);
    served.map(|()| ExitCode::SUCCESS)
}

async fn serve(given: Given, read: impl Fn() -> anyhow::Result<Given>) -> anyhow::Result<()> {
    let serve = given.serve.clone();
    // A signal that comes before the service is ready must not end it half-way.
    let signals = ServerSignals::register()?;
    // First of all else: who finds another process at its place must not touch its records.
    let listener = Listener::bind(&serve.listen)?;
    let metrics = given.config.metrics.address.map(app::bind_metrics).transpose()?;
    // And who finds another at its state must not bring that to another version.
    let lock = Lock::take(&serve.state_dir()).await?;
    make(&serve.run_dir)?;
    let schemas = [grant::SCHEMA, journal::SCHEMA, billing::SCHEMA];
    let seats = Seats::new(&given.config)?;
    let writes = seats.metrics().state_writes();
    let file = serve.database();
    let database = Database::open_watched(&file, &schemas, writes)
        .with_context(|| format!("cannot serve from `{}`", file.display()))?;
    let books = Books::new(database.clone()).with_bound(serve.receipt_bound);
    let grants = Grants::new(database.clone());
    let parts = Parts {
        lock,
        config: given.config.clone(),
        catalog: given.catalog.clone(),
        seats: seats.clone(),
        journal: Journal::new(database),
        grants: grants.clone(),
        books: books.clone(),
        relay: relay(&given)?,
    };
    let settings = given.settings()?;
    let machine = machine(&settings);
    let supervisor = Box::pin(Supervisor::open(settings, parts)).await?;
    let api = Arc::new(Api {
        books: books.clone(),
        grants,
        anybody: serve.insecure_no_auth.then(|| Arc::new(Api::anybody())),
        supervisor: supervisor.clone(),
        availability: Availability::new(machine, MAX_AGE),
        metrics: Arc::clone(seats.metrics()),
        watchers: Shares::new(serve.max_watchers, serve.max_connections),
        downloads: Shares::new(DOWNLOADS_PER_GRANT, DOWNLOADS),
        long_reads: Turns::new(LONG_READS_PER_GRANT),
        proofs: Proofs::new(half_of_the_processors()),
        reports: Turns::new(REPORTS_PER_GRANT).within(REPORTS),
        limits: Limits { connections: serve.max_connections, patience: serve.request_timeout },
        tasks: Drain::default(),
    });
    let stop = app::Stop::default();
    let common = (books, Arc::clone(seats.metrics()));
    let (bookkeeper, litellm) = Bookkeeper::new(common, &given.config, serve.reconcile_every)?;
    let over = Reload { first: &given, supervisor: &supervisor, seats: &seats, litellm };
    let reload = || {
        let done = read().and_then(|fresh| over.take_over(fresh));
        seats.metrics().reloaded(done.is_ok());
        done
    };
    let signals = signals.obey(stop.clone(), seats.access_log(), reload);
    let service = Service {
        listener,
        metrics,
        seats: seats.clone(),
        supervisor: supervisor.clone(),
        api,
        bookkeeper,
    };
    tokio::select! {
        biased;
        served = service.run(stop, serve.drain_timeout) => served,
        never = signals => match never {},
    }
}

/// All that runs until it is told to end.
struct Service {
    listener: Listener,
    metrics: Option<TcpListener>,
    seats: Seats,
    supervisor: Supervisor,
    api: Arc<Api>,
    bookkeeper: Bookkeeper,
}

impl Service {
    async fn run(self, told: app::Stop, patience: Duration) -> anyhow::Result<()> {
        let Self { listener, metrics, seats, supervisor, api, bookkeeper } = self;
        let (stop, tasks) = (CancellationToken::new(), api.tasks.clone());
        let metrics_address = metrics.as_ref().and_then(|listener| listener.local_addr().ok());
        tracing::info!(
            address = listener.address().map(tracing::field::display),
            socket = listener.path().map(|path| tracing::field::display(path.display())),
            metrics = metrics_address.map(tracing::field::display),
            grants = api.anybody.is_none(),
            "ready"
        );
        let pages = seats.pages();
        let scraped = async {
            let Some(metrics) = metrics else { return };
            crate::base::metrics::serve(metrics, pages, stop.cancelled()).await;
        };
        let ended = async {
            told.shutdown.cancelled().await;
            tracing::info!(runs = supervisor.live(), "draining");
            // Who asks whether we are ready is answered, and who watches a run sees its end.
            supervisor.drain(Instant::now() + patience, &told.hurry).await;
            stop.cancel();
            tasks.finish(LAST_WORDS).await;
        };
        let served = listener.serve(&api);
        let kept = supervisor.keep(stop.clone());
        let (served, (), (), (), ()) =
            tokio::join!(served, scraped, kept, bookkeeper.run(stop.clone()), ended);
        served.context("cannot serve the listener")?;
        seats.finish().await?;
        tracing::info!("stopped");
        Ok(())
    }
}

/// A service without git has no repositories; whoever asks for one is told. What else is wrong with a relay is put right
/// before anybody depends on it.
fn relay(given: &Given) -> anyhow::Result<Option<Arc<Relay>>> {
    let keys = Keys::of(&given.config);
    match given.relay.clone().open(|name| std::env::var(name).ok(), keys) {
        Ok(relay) => Ok(Some(Arc::new(relay))),
        Err(error) if is_without_git(&error) => {
            tracing::warn!("there is no relay: {error:#}");
            Ok(None)
        }
        Err(error) => Err(error.context("the relay cannot be opened")),
    }
}

fn is_without_git(error: &anyhow::Error) -> bool {
    let without_git =
        |error: &_| matches!(error, Error::Relay(relay::Error::Git(git::Error::Unfit { .. })));
    error.downcast_ref().is_some_and(without_git)
}

/// Where runs have their directories. Others may pass through, and see nothing.
fn make(run_dir: &Path) -> anyhow::Result<()> {
    let unusable = || format!("`serve.run_dir` is `{}`, which cannot be used", run_dir.display());
    private_dir::make(run_dir, 0o711).with_context(unusable)?;
    runner::check_run_dir(run_dir).with_context(unusable)
}

/// What this machine has for agents.
fn machine(settings: &Settings) -> Machine {
    Machine {
        docker_socket: settings.host.docker_socket.clone(),
        driver: settings.driver,
        init: settings.host.init.clone(),
        may_be_unlimited: settings.allow_unlimited,
    }
}

/// Proofs of audit logs at the same time: each takes a processor for as long as it reads.
fn half_of_the_processors() -> usize {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    (processors / 2).max(1)
}

fn settings() -> impl Iterator<Item = &'static Setting> {
    let is_here = |setting: &&Setting| !setting.is_of_one_run() && !setting.is_of_its_operator();
    SETTINGS.iter().filter(is_here).filter(|setting| setting.name != "WORKERS")
}

/// Lists and proofs of one grant at the same time; the database has four connections for long reads of all grants.
const LONG_READS_PER_GRANT: usize = 2;

/// Files that are sent to one grant at the same time, and to all. Ours: a client needs one.
const DOWNLOADS_PER_GRANT: usize = 4;
const DOWNLOADS: usize = 64;

/// Reports of costs that are received at the same time, of a grant and of all: each may have 16 MiB.
const REPORTS_PER_GRANT: usize = 2;
const REPORTS: usize = 4;

/// For answers that are being written when the last run has ended.
const LAST_WORDS: Duration = Duration::from_secs(5);

const ABOUT: &str = "Serve agents, chats and runs over HTTP, for those who hold a grant";

const EXAMPLE: &str = "\
The service's own settings stand in the file's `[serve]`; the others are what a run has that says nothing else.

SIGTERM drains: `/readyz` says so, nothing new is accepted, and runs may end within `serve.drain_timeout`. SIGHUP reads
configuration, agents and the relay's files again; runs that are accepted from then on have the new ones.

Example:
  cogni-gateway grant mint --name me --allow-sandbox --agent '*' --account acct-1
  cogni-gateway serve --litellm-host litellm:4000 --litellm-master-key-file /run/secrets/litellm";
