//! `cogni-gateway billing`: what runs have cost, and whether whoever charges for it agrees.

pub mod show;

use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, anyhow, bail};
use clap::Subcommand;

use crate::base::db::SqliteDatabase;
use crate::base::secret::SecretString;
use crate::cli::relay::StateDirArgs;
use crate::gateway::config::setting::SETTINGS;
use crate::gateway::upstream::UpstreamUrl;
use crate::service::billing::call_usage::CallUsageReader;
use crate::service::billing::litellm::{LitellmClient, LitellmConfig};
use crate::service::billing::store::CallFilter;
use crate::service::billing::{self, BillingStore};

pub use show::BillingOutputFormat;

/// Show what runs have cost, and whether LiteLLM agrees.
#[derive(Debug, Subcommand)]
pub enum BillingCommand {
    /// Show what is charged, and what somebody has to look at
    Status {
        #[command(flatten)]
        books: BillingDbArgs,

        /// One line of JSON
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

        /// A line of JSON for each, and one for the sum
        #[arg(long)]
        json: bool,
    },
    /// Show what the calls of each day and account came to, also calls that are deleted
    Days {
        #[command(flatten)]
        books: BillingDbArgs,

        /// Days from then on: a time, or how long ago
        #[arg(long, value_name = "TIME|DURATION", default_value = "30d", value_parser = parse_time)]
        since: SystemTime,

        /// Days until then: a time, or how long ago [default: now]
        #[arg(long, value_name = "TIME|DURATION", value_parser = parse_time)]
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
        books: BillingDbArgs,

        #[command(flatten)]
        litellm: LitellmArgs,

        /// Calls that began from then on: a time, or how long ago
        #[arg(long, value_name = "TIME|DURATION", default_value = "24h", value_parser = parse_time)]
        since: SystemTime,

        /// Calls that began before: a time, or how long ago [default: now]
        #[arg(long, value_name = "TIME|DURATION", value_parser = parse_time)]
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
        books: BillingDbArgs,

        /// The audit logs of runs that have ended
        #[arg(required = true, value_name = "AUDIT_LOG")]
        logs: Vec<PathBuf>,
    },
    /// Take in what LiteLLM's callback has sent, from a file or from standard input
    Ingest {
        #[command(flatten)]
        books: BillingDbArgs,

        /// A JSON array of what it has sent, or one on each line [default: standard input]
        file: Option<PathBuf>,
    },
}

/// Where the books are.
#[derive(Clone, Debug, clap::Args)]
pub struct BillingDbArgs {
    #[command(flatten)]
    state: StateDirArgs,

    /// How long after its end a call may be without a receipt
    #[arg(
        long,
        value_name = "DURATION",
        env = "BILLING_RECEIPT_BOUND",
        default_value = "15m",
        value_parser = crate::cli::flags::parse_duration
    )]
    receipt_bound: Duration,
}

/// Where LiteLLM is, and what lets us in.
#[derive(Clone, Debug, clap::Args)]
pub struct LitellmArgs {
    /// LiteLLM
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

/// Exit status 1 where something is missing, unknown or contradicted.
pub fn run(command: BillingCommand, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        match command {
            BillingCommand::Status { books, json } => {
                print_status(&books.open_existing()?, json, out).await
            }
            BillingCommand::Receipts { books, run, named, json } => {
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
                let (books, client) = (books.open_existing()?, litellm.into_client()?);
                let report = books.reconcile(&client, &filter, now).await?;
                BillingOutputFormat { json }.write_report(&report, books.receipt_bound(), out)?;
                Ok(exit_code(report.is_clean()))
            }
            BillingCommand::Record { books, logs } => {
                record_logs(&books.open_or_create()?, &logs, out).await
            }
            BillingCommand::Ingest { books, file } => {
                let ingested = books.open_or_create()?.ingest(read_body(file.as_deref())?).await?;
                serde_json::to_writer(&mut *out, &ingested)?;
                writeln!(out)?;
                Ok(exit_code(ingested.invalid == 0 && ingested.conflicting == 0))
            }
        }
    })
}

async fn print_status(
    books: &BillingStore,
    json: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let now = SystemTime::now();
    let (totals, flagged) = (books.totals(now).await?, books.flagged_runs(now).await?);
    BillingOutputFormat { json }.write_status(&totals, &flagged, out)?;
    Ok(exit_code(flagged.is_empty()))
}

async fn print_receipts(
    books: &BillingStore,
    run: &str,
    json: bool,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let bill = books.run_bill(run).await?;
    if bill.calls == 0 {
        bail!(
            "the books have no call of run `{}`; of calls that are deleted, `billing days` has the sums",
            run.escape_debug()
        );
    }
    BillingOutputFormat { json }.write_receipts(&books.receipts_of_run(run).await?, &bill, out)?;
    Ok(exit_code(bill.flags.is_empty()))
}

async fn record_logs(
    books: &BillingStore,
    logs: &[PathBuf],
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    let mut is_whole = true;
    for log in logs {
        // A log that is not there yet is none for a follower; here it is a mistake.
        fs::metadata(log).with_context(|| format!("`{}`", log.display()))?;
        let (facts, end) = CallUsageReader::open(log).finish();
        let new = books.record_calls(&facts).await?;
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
    /// Those that there are.
    fn open_existing(&self) -> anyhow::Result<BillingStore> {
        let path = self.database_path();
        // To look is not to make one.
        if !path.exists() {
            bail!("there are no books here: there is no `{}`; see `--state-dir`", path.display());
        }
        self.open_or_create()
    }

    /// Those that there are, or from now on.
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
        let setting = SETTINGS.iter().find(|setting| setting.name == "LITELLM_MASTER_KEY");
        let setting = setting.ok_or_else(|| anyhow!("there is no such setting"))?;
        let key =
            setting.find_value(self.litellm_master_key_file, |name| std::env::var(name).ok())?;
        let key = SecretString::new(key.context("give `LITELLM_MASTER_KEY`, or its file")?);
        let (url, ca_file) = (self.litellm_host, self.upstream_ca_file);
        LitellmClient::new(LitellmConfig { url, key, ca_file })
            .context("the authorities cannot be read")
    }
}

fn read_body(file: Option<&Path>) -> anyhow::Result<Vec<u8>> {
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
fn parse_time(text: &str) -> Result<SystemTime, String> {
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
