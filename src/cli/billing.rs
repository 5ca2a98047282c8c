//! `cogni-gateway billing`: shows the costs of runs, and compares them with LiteLLM's.

pub mod show;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail};
use clap::Subcommand;

use crate::base::db::SqliteDatabase;
use crate::base::regular_file::{open_regular_file, read_within};
use crate::base::secret::SecretString;
use crate::cli::relay::StateDirArgs;
use crate::gateway::config::setting::SETTINGS;
use crate::gateway::upstream::UpstreamUrl;
use crate::service::billing::call_usage::CallUsageReader;
use crate::service::billing::litellm::{LitellmClient, LitellmConfig};
use crate::service::billing::store::CallFilter;
use crate::service::billing::{self, BillingStore};

pub use show::BillingOutputFormat;

/// The subcommands of `billing`.
#[derive(Debug, Subcommand)]
pub enum BillingCommand {
    /// Show the sums, and the runs that need attention
    Status {
        #[command(flatten)]
        books: BillingDbArgs,

        /// Print one line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Show a run's receipts
    Receipts {
        #[command(flatten)]
        books: BillingDbArgs,

        /// The run's id
        #[arg(value_name = "RUN", required_unless_present = "named")]
        run: Option<String>,

        /// The run's id, as earlier versions took it
        #[arg(long = "run", value_name = "ID", hide = true, conflicts_with = "run")]
        named: Option<String>,

        /// Print a line of JSON for each receipt, and a line for the sum
        #[arg(long)]
        json: bool,
    },
    /// Show the sums of each day and account, deleted calls included
    Days {
        #[command(flatten)]
        books: BillingDbArgs,

        /// First day: a time, or how long ago
        #[arg(long, value_name = "TIME|DURATION", default_value = "30d", value_parser = parse_time)]
        since: SystemTime,

        /// Last day: a time, or how long ago [default: now]
        #[arg(long, value_name = "TIME|DURATION", value_parser = parse_time)]
        until: Option<SystemTime>,

        /// Only the calls of this account
        #[arg(long, value_name = "ID")]
        account: Option<String>,

        /// Print a line of JSON for each day
        #[arg(long)]
        json: bool,
    },
    /// Compare the billing records with LiteLLM's spend logs; write missing receipts
    Reconcile {
        #[command(flatten)]
        books: BillingDbArgs,

        #[command(flatten)]
        litellm: LitellmArgs,

        /// Begin of the calls, from: a time, or how long ago
        #[arg(long, value_name = "TIME|DURATION", default_value = "24h", value_parser = parse_time)]
        since: SystemTime,

        /// Begin of the calls, before: a time, or how long ago [default: now]
        #[arg(long, value_name = "TIME|DURATION", value_parser = parse_time)]
        until: Option<SystemTime>,

        /// Only the calls of this account
        #[arg(long, value_name = "ID")]
        account: Option<String>,

        /// Only the calls of this run
        #[arg(long, value_name = "ID")]
        run: Option<String>,

        /// Print one line of JSON
        #[arg(long)]
        json: bool,
    },
    /// Add the calls of finished runs to the billing records, from their audit logs
    Record {
        #[command(flatten)]
        books: BillingDbArgs,

        /// The audit logs of runs that have ended
        #[arg(required = true, value_name = "AUDIT_LOG")]
        logs: Vec<PathBuf>,
    },
    /// Add the notices of LiteLLM's callback to the billing records
    Ingest {
        #[command(flatten)]
        books: BillingDbArgs,

        /// A JSON array of notices, or a notice on each line [default: standard input]
        file: Option<PathBuf>,
    },
}

/// The flags for the billing database.
#[derive(Clone, Debug, clap::Args)]
pub struct BillingDbArgs {
    #[command(flatten)]
    state: StateDirArgs,

    /// Time that a call may be without a receipt after its end
    #[arg(
        long,
        value_name = "DURATION",
        env = "BILLING_RECEIPT_BOUND",
        default_value = "15m",
        value_parser = crate::cli::flags::parse_duration
    )]
    receipt_bound: Duration,
}

/// The flags for LiteLLM's address and key.
#[derive(Clone, Debug, clap::Args)]
pub struct LitellmArgs {
    /// LiteLLM's address
    #[arg(
        long,
        value_name = "HOST:PORT|URL",
        env = "LITELLM_HOST",
        default_value = "litellm:4000"
    )]
    litellm_host: UpstreamUrl,

    /// File with a key that may read spend logs [env: `LITELLM_MASTER_KEY` or `LITELLM_MASTER_KEY_FILE`]
    #[arg(long, value_name = "PATH")]
    litellm_master_key_file: Option<String>,

    /// PEM file of authorities to trust instead of the system's
    #[arg(long, value_name = "PATH", env = "UPSTREAM_CA_FILE")]
    upstream_ca_file: Option<PathBuf>,
}

/// Runs the command. The exit status is 1 if a receipt is missing, or a record is unknown or contradicted.
pub fn run(command: BillingCommand, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            BillingCommand::Status { books, json } => {
                print_status(&books.open_existing()?, json, out).await
            }
            BillingCommand::Receipts { books, run, named, json } => {
                // `--run` is the hidden flag of earlier versions.
                let run = run.or(named).unwrap_or_default();
                print_receipts(&books.open_existing()?, &run, json, out).await
            }
            BillingCommand::Days { books, since, until, account, json } => {
                let until = until.unwrap_or_else(SystemTime::now);
                let days = books.open_existing()?.daily_bills(since, until, account).await?;
                BillingOutputFormat { json }.write_days(&days, out)?;
                Ok(ExitCode::SUCCESS)
            }
            BillingCommand::Reconcile { books, litellm, since, until, account, run, json } => {
                let now = SystemTime::now();
                let filter = CallFilter { since, until: until.unwrap_or(now), account, run };
                let (store, client) = (books.open_existing()?, litellm.into_client()?);
                let report = store.reconcile(&client, &filter, now).await?;
                BillingOutputFormat { json }.write_report(&report, store.receipt_bound(), out)?;
                Ok(exit_code(report.is_clean()))
            }
            BillingCommand::Record { books, logs } => {
                record_logs(&books.open_or_create()?, &logs, out).await
            }
            BillingCommand::Ingest { books, file } => {
                // Notices may arrive before any audit log, so the database is created if it does not exist.
                let ingested = books.open_or_create()?.ingest(read_body(file.as_deref())?).await?;
                serde_json::to_writer(&mut *out, &ingested)?;
                writeln!(out)?;
                // A notice that the database has already is not an error.
                Ok(exit_code(ingested.invalid == 0 && ingested.conflicting == 0))
            }
        }
    })
}

async fn print_status(
    store: &BillingStore,
    json: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let now = SystemTime::now();
    let (totals, flagged) = (store.totals(now).await?, store.flagged_runs(now).await?);
    BillingOutputFormat { json }.write_status(&totals, &flagged, out)?;
    Ok(exit_code(flagged.is_empty()))
}

async fn print_receipts(
    store: &BillingStore,
    run: &str,
    json: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let bill = store.run_bill(run).await?;
    if bill.calls == 0 {
        bail!(
            "the billing records have no call of run `{}`; if its calls were deleted, `billing days` has their sums",
            run.escape_debug()
        );
    }
    BillingOutputFormat { json }.write_receipts(&store.receipts_of_run(run).await?, &bill, out)?;
    Ok(exit_code(bill.flags.is_empty()))
}

async fn record_logs(
    store: &BillingStore,
    logs: &[PathBuf],
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let mut is_whole = true;
    for log in logs {
        // The reader takes a missing log as empty, because a follower may be faster than the writer. A named log that
        // is missing is a mistake, and one that is no file never ends.
        open_regular_file(log).with_context(|| format!("`{}`", log.display()))?;
        // The calls before a broken record are still added; the exit status reports the break.
        let (facts, end) = CallUsageReader::open(log).finish();
        let new = store.record_calls(&facts).await?;
        writeln!(out, "{}: {} calls, {new} of them new", log.display(), facts.len())?;
        if let Err(error) = end {
            let error = anyhow::Error::from(error);
            writeln!(out, "    {error:#}")?;
            is_whole = false;
        }
    }
    Ok(exit_code(is_whole))
}

impl BillingDbArgs {
    /// Opens the existing database.
    fn open_existing(&self) -> anyhow::Result<BillingStore> {
        let path = self.database_path();
        // A command that only reads must not create a database.
        if !path.exists() {
            bail!(
                "no billing records found: `{}` does not exist; see `--state-dir`",
                path.display()
            );
        }
        self.open_or_create()
    }

    /// Opens the database, or creates it.
    fn open_or_create(&self) -> anyhow::Result<BillingStore> {
        let database = SqliteDatabase::open_database(&self.database_path(), &[billing::SCHEMA])?;
        Ok(BillingStore::new(database).with_bound(self.receipt_bound))
    }

    fn database_path(&self) -> PathBuf {
        self.state.path().join(billing::store::DATABASE_FILE)
    }
}

impl LitellmArgs {
    fn into_client(self) -> anyhow::Result<LitellmClient> {
        // The key has the same sources as in the gateway: the file of a flag or variable, or the variable.
        let setting = SETTINGS.iter().find(|setting| setting.name == "LITELLM_MASTER_KEY");
        let setting = setting.ok_or_else(|| anyhow!("there is no such setting"))?;
        let key =
            setting.find_value(self.litellm_master_key_file, |name| std::env::var(name).ok())?;
        let key = SecretString::new(key.context("give `LITELLM_MASTER_KEY`, or its file")?);
        let (url, ca_file) = (self.litellm_host, self.upstream_ca_file);
        LitellmClient::new(LitellmConfig { url, key, ca_file })
            .context("cannot read the file of certificate authorities")
    }
}

fn read_body(file: Option<&Path>) -> anyhow::Result<Vec<u8>> {
    match file {
        Some(path) => open_regular_file(path)
            .and_then(|file| read_within(file, MAX_INGEST_BYTES))
            .with_context(|| format!("`{}`", path.display())),
        None => read_within(io::stdin().lock(), MAX_INGEST_BYTES).context("standard input"),
    }
}

/// The largest input of `ingest`, in bytes. Our choice: a hundred thousand notices.
const MAX_INGEST_BYTES: u64 = 256 * 1024 * 1024;

/// Parses `2026-11-22T09:30:00Z`, or a duration such as `24h` before now.
fn parse_time(text: &str) -> Result<SystemTime, String> {
    // A duration counts back from now.
    if let Ok(ago) = humantime::parse_duration(text) {
        return SystemTime::now().checked_sub(ago).ok_or_else(|| "that is too long ago".to_owned());
    }
    humantime::parse_rfc3339_weak(text).map_err(|_| {
        "give a time such as 2026-11-22T09:30:00Z, or how long ago, such as 24h".to_owned()
    })
}

fn exit_code(is_well: bool) -> ExitCode {
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
