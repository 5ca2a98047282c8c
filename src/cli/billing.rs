//! `cogni-gateway billing`: what runs have cost, and whether whoever charges for it agrees.

pub mod show;

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail};
use clap::Subcommand;

use crate::base::db::Database;
use crate::base::secret::Secret;
use crate::billing::books::Filter;
use crate::billing::facts::Reader;
use crate::billing::litellm::{Client, Settings};
use crate::billing::{self, Books};
use crate::cli::relay::StateDir;
use crate::config::setting::SETTINGS;
use crate::upstream::Target;

pub use show::Shown;

/// Show what runs have cost, and whether LiteLLM agrees.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show what is charged, and what somebody has to look at
    Status {
        #[command(flatten)]
        books: Where,

        /// One line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a run's receipts
    Receipts {
        #[command(flatten)]
        books: Where,

        /// The run's id
        #[arg(value_name = "RUN", required_unless_present = "named")]
        run: Option<String>,

        /// The run's id, as earlier versions took it
        #[arg(long = "run", value_name = "ID", hide = true, conflicts_with = "run")]
        named: Option<String>,

        /// A line of JSON for each, and one for the sum
        #[arg(long)]
        json: bool,
    },
    /// Show what the calls of each day and account came to, also calls that are deleted
    Days {
        #[command(flatten)]
        books: Where,

        /// Days from then on: a time, or how long ago
        #[arg(long, value_name = "TIME|DURATION", default_value = "30d", value_parser = moment)]
        since: SystemTime,

        /// Days until then: a time, or how long ago [default: now]
        #[arg(long, value_name = "TIME|DURATION", value_parser = moment)]
        until: Option<SystemTime>,

        /// One account's calls
        #[arg(long, value_name = "ID")]
        account: Option<String>,

        /// A line of JSON for each
        #[arg(long)]
        json: bool,
    },
    /// Compare the books with LiteLLM's spend logs, and write the receipts that are missing
    Reconcile {
        #[command(flatten)]
        books: Where,

        #[command(flatten)]
        litellm: Server,

        /// Calls that began from then on: a time, or how long ago
        #[arg(long, value_name = "TIME|DURATION", default_value = "24h", value_parser = moment)]
        since: SystemTime,

        /// Calls that began before: a time, or how long ago [default: now]
        #[arg(long, value_name = "TIME|DURATION", value_parser = moment)]
        until: Option<SystemTime>,

        /// One account's calls
        #[arg(long, value_name = "ID")]
        account: Option<String>,

        /// One run's calls
        #[arg(long, value_name = "ID")]
        run: Option<String>,

        /// One line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Take the calls of finished runs into the books, from their audit logs
    Record {
        #[command(flatten)]
        books: Where,

        /// The audit logs of runs that have ended
        #[arg(required = true, value_name = "AUDIT_LOG")]
        logs: Vec<PathBuf>,
    },
    /// Take in what LiteLLM's callback has sent, from a file or from standard input
    Ingest {
        #[command(flatten)]
        books: Where,

        /// A JSON array of what it has sent, or one on each line [default: standard input]
        file: Option<PathBuf>,
    },
}

/// Where the books are.
#[derive(Clone, Debug, clap::Args)]
pub struct Where {
    #[command(flatten)]
    state: StateDir,

    /// How long after its end a call may be without a receipt
    #[arg(
        long,
        value_name = "DURATION",
        env = "BILLING_RECEIPT_BOUND",
        default_value = "15m",
        value_parser = crate::cli::flags::time
    )]
    receipt_bound: Duration,
}

/// Where LiteLLM is, and what lets us in.
#[derive(Clone, Debug, clap::Args)]
pub struct Server {
    /// LiteLLM
    #[arg(
        long,
        value_name = "HOST:PORT|URL",
        env = "LITELLM_HOST",
        default_value = "litellm:4000"
    )]
    litellm_host: Target,

    /// File with a key that may read spend logs [env: `LITELLM_MASTER_KEY` or `LITELLM_MASTER_KEY_FILE`]
    #[arg(long, value_name = "PATH")]
    litellm_master_key_file: Option<String>,

    /// PEM file of authorities to trust instead of the system's
    #[arg(long, value_name = "PATH", env = "UPSTREAM_CA_FILE")]
    upstream_ca_file: Option<PathBuf>,
}

/// Exit status 1 where something is missing, unknown or contradicted.
pub fn run(command: Command, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            Command::Status { books, json } => status(&books.find()?, json, out).await,
            Command::Receipts { books, run, named, json } => {
                let run = run.or(named).unwrap_or_default();
                receipts(&books.find()?, &run, json, out).await
            }
            Command::Days { books, since, until, account, json } => {
                let until = until.unwrap_or_else(SystemTime::now);
                let days = books.find()?.days(since, until, account).await?;
                Shown { json }.days(&days, out)?;
                Ok(ExitCode::SUCCESS)
            }
            Command::Reconcile { books, litellm, since, until, account, run, json } => {
                let now = SystemTime::now();
                let filter = Filter { since, until: until.unwrap_or(now), account, run };
                let (books, client) = (books.find()?, litellm.client()?);
                let report = books.reconcile(&client, &filter, now).await?;
                Shown { json }.report(&report, books.bound(), out)?;
                Ok(code(report.is_clean()))
            }
            Command::Record { books, logs } => record(&books.open()?, &logs, out).await,
            Command::Ingest { books, file } => {
                let ingested = books.open()?.ingest(body(file.as_deref())?).await?;
                serde_json::to_writer(&mut *out, &ingested)?;
                writeln!(out)?;
                Ok(code(ingested.invalid == 0 && ingested.conflicting == 0))
            }
        }
    })
}

async fn status(books: &Books, json: bool, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let now = SystemTime::now();
    let (totals, flagged) = (books.totals(now).await?, books.flagged(now).await?);
    Shown { json }.status(&totals, &flagged, out)?;
    Ok(code(flagged.is_empty()))
}

async fn receipts(
    books: &Books,
    run: &str,
    json: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let bill = books.summary(run).await?;
    if bill.calls == 0 {
        bail!(
            "the books have no call of run `{}`; of calls that are deleted, `billing days` has the sums",
            run.escape_debug()
        );
    }
    Shown { json }.receipts(&books.receipts(run).await?, &bill, out)?;
    Ok(code(bill.flags.is_empty()))
}

async fn record(books: &Books, logs: &[PathBuf], out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let mut is_whole = true;
    for log in logs {
        // A log that is not there yet is none for a follower; here it is a mistake.
        fs::metadata(log).with_context(|| format!("`{}`", log.display()))?;
        let (facts, end) = Reader::open(log).finish();
        let new = books.record(&facts).await?;
        writeln!(out, "{}: {} calls, {new} of them new", log.display(), facts.len())?;
        if let Err(error) = end {
            let error = anyhow::Error::from(error);
            writeln!(out, "    {error:#}")?;
            is_whole = false;
        }
    }
    Ok(code(is_whole))
}

impl Where {
    /// Those that there are.
    fn find(&self) -> anyhow::Result<Books> {
        let path = self.path();
        // To look is not to make one.
        if !path.exists() {
            bail!("there are no books here: there is no `{}`; see `--state-dir`", path.display());
        }
        self.open()
    }

    /// Those that there are, or from now on.
    fn open(&self) -> anyhow::Result<Books> {
        let database = Database::open(&self.path(), &[billing::SCHEMA])?;
        Ok(Books::new(database).with_bound(self.receipt_bound))
    }

    fn path(&self) -> PathBuf {
        self.state.path().join(billing::books::FILE)
    }
}

impl Server {
    fn client(self) -> anyhow::Result<Client> {
        let setting = SETTINGS.iter().find(|setting| setting.name == "LITELLM_MASTER_KEY");
        let setting = setting.ok_or_else(|| anyhow!("there is no such setting"))?;
        let key = setting.find(self.litellm_master_key_file, |name| std::env::var(name).ok())?;
        let key = Secret::new(key.context("give `LITELLM_MASTER_KEY`, or its file")?);
        let (url, ca_file) = (self.litellm_host, self.upstream_ca_file);
        Client::new(Settings { url, key, ca_file }).context("the authorities cannot be read")
    }
}

fn body(file: Option<&Path>) -> anyhow::Result<Vec<u8>> {
    let mut body = vec![];
    match file {
        Some(path) => {
            body = fs::read(path).with_context(|| format!("`{}`", path.display()))?;
        }
        None => {
            io::stdin().lock().read_to_end(&mut body)?;
        }
    }
    Ok(body)
}

/// `2026-11-22T09:30:00Z`, or `24h` for what was then.
fn moment(text: &str) -> Result<SystemTime, String> {
    if let Ok(ago) = humantime::parse_duration(text) {
        return SystemTime::now().checked_sub(ago).ok_or_else(|| "that is too long ago".to_owned());
    }
    humantime::parse_rfc3339_weak(text).map_err(|_| {
        "give a time such as 2026-11-22T09:30:00Z, or how long ago, such as 24h".to_owned()
    })
}

fn code(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
