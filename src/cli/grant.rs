//! `cogni-gateway grant`: manages the grants of a service, while the service runs or before its first start.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{anyhow, bail};
use clap::Subcommand;
use serde_json::{Value, json};

use super::relay::StateDirArgs;
use super::run::AgentsDirArgs;
use crate::base::db::SqliteDatabase;
use crate::base::timestamp;
use crate::gateway::config::GatewayConfig;
use crate::llm::budget::{BudgetLimits, Nanodollars, Tokens};
use crate::relay::repo::repository::RepositoryUrl;
use crate::service::auth::{
    self, AccessGrant, GrantPattern, GrantScope, GrantStore, GrantTerms, GrantTermsError,
};
use crate::service::config::ServiceConfig;
use crate::service::store::{self, GrantSpending, RunStore, SpendingCaps, SpendingStatus};

/// The flags for the location of the grants.
#[derive(Debug, clap::Args)]
pub struct GrantStoreArgs {
    #[command(flatten)]
    state: StateDirArgs,

    /// The service's file: its `serve.state_dir` counts if no `--state-dir` is given
    #[arg(long, value_name = "FILE", env = "CONFIG")]
    config: Option<PathBuf>,
}

/// The subcommands of `grant`.
#[derive(Debug, Subcommand)]
pub enum GrantCommand {
    /// Make a grant, and print its token, which is displayed only now
    Mint(Box<MintGrantArgs>),
    /// Show all grants
    List {
        #[command(flatten)]
        place: GrantStoreArgs,

        /// Also list expired and revoked grants
        #[arg(long)]
        all: bool,

        /// Print a line of JSON for each grant
        #[arg(long)]
        json: bool,
    },
    /// Show one grant, its terms, and the rest of its money
    Show {
        #[command(flatten)]
        place: GrantStoreArgs,

        /// The grant, as listed by `grant list`
        id: String,
    },
    /// Revoke a grant; a running service notices within half a second
    Revoke {
        #[command(flatten)]
        place: GrantStoreArgs,

        /// The grant, as listed by `grant list`
        id: String,

        /// Also end its runs; a running service does so within some seconds
        #[arg(long)]
        cancel_runs: bool,
    },
}

/// The terms of a new grant.
#[derive(Debug, clap::Args)]
pub struct MintGrantArgs {
    #[command(flatten)]
    place: GrantStoreArgs,

    /// Name of the holder, for people
    #[arg(long)]
    name: String,

    /// Kinds of access: read, runs, billing, admin, approve
    #[arg(long, value_name = "KIND,…", value_delimiter = ',', default_value = "read,runs")]
    access: Vec<GrantScope>,

    /// Allow agents in sandboxes
    #[arg(long)]
    allow_sandbox: bool,

    /// Agent that the grant may run or answer for, such as `sandbox:agent`; a `*` at the end matches any rest
    #[arg(long = "agent", value_name = "NAME")]
    agents: Vec<GrantPattern>,

    /// Account that may pay, or whose runs the grant answers for; the first pays if a run names none
    #[arg(long = "account", value_name = "ACCOUNT")]
    accounts: Vec<GrantPattern>,

    /// Repository that the grant's runs may use, such as `https://github.com/acme/*`
    #[arg(long = "repo", value_name = "URL")]
    repositories: Vec<GrantPattern>,

    /// Time until the grant expires, such as 90d [default: never]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::parse_duration)]
    ttl: Option<Duration>,

    /// Maximum number of concurrent runs; further runs wait
    #[arg(long, value_name = "COUNT", value_parser = crate::cli::flags::count::<u32>)]
    max_runs: Option<u32>,

    /// Maximum number of waiting runs [default: the service's `max_queued_runs_per_grant`]
    #[arg(long, value_name = "COUNT", value_parser = crate::cli::flags::count::<u32>)]
    max_queued_runs: Option<u32>,

    /// Print the grant and its token as JSON, in place of the token alone
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    catalog: AgentsDirArgs,

    #[command(flatten)]
    budget: RunBudgetArgs,

    #[command(flatten)]
    money: GrantSpendingArgs,
}

/// The limits of one run.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits of one run")]
struct RunBudgetArgs {
    /// Calls that make a model generate
    #[arg(long, value_name = "COUNT", value_parser = crate::cli::flags::count::<u64>)]
    max_turns: Option<u64>,

    /// Tokens in and out together
    #[arg(long, value_name = "COUNT", value_parser = crate::cli::flags::count::<u64>)]
    max_total_tokens: Option<u64>,

    /// Money, by the price table
    #[arg(long, value_name = "DOLLARS", value_parser = parse_dollars)]
    max_cost_usd: Option<Nanodollars>,

    /// Maximum duration
    #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::parse_duration)]
    deadline: Option<Duration>,
}

/// The limits of all runs of the grant together.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Limits of all runs of the grant")]
struct GrantSpendingArgs {
    /// Money of all runs, by the price table [default: no limit]
    #[arg(long, value_name = "DOLLARS", value_parser = parse_dollars)]
    max_cost_usd_total: Option<Nanodollars>,

    /// Money of the runs of one day (UTC) [default: no limit]
    #[arg(long, value_name = "DOLLARS", value_parser = parse_dollars)]
    max_cost_usd_per_day: Option<Nanodollars>,
}

/// Runs the command.
pub fn run(command: GrantCommand, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        match command {
            GrantCommand::Mint(wanted) => mint_grant(*wanted, out).await?,
            GrantCommand::List { place, all, json } => {
                list_grants(&find(&place)?, all, json, out).await?;
            }
            GrantCommand::Show { place, id } => {
                writeln!(out, "{:#}", show_grant(&place, &id).await?)?;
            }
            GrantCommand::Revoke { place, id, cancel_runs } => {
                let grants = find(&place)?;
                let grant = if cancel_runs {
                    grants.revoke_and_cancel_runs(&id).await?
                } else {
                    grants.revoke_grant(&id).await?
                };
                writeln!(out, "{} ({}) is revoked", grant.id, grant.name)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

async fn mint_grant(wanted: MintGrantArgs, out: &mut impl Write) -> anyhow::Result<()> {
    let MintGrantArgs {
        place, name, access, allow_sandbox, agents, accounts, repositories, ..
    } = wanted;
    let RunBudgetArgs { max_turns, max_total_tokens, max_cost_usd, deadline } = wanted.budget;
    let GrantSpendingArgs { max_cost_usd_total, max_cost_usd_per_day } = wanted.money;
    let terms = GrantTerms {
        access: access.into_iter().collect(),
        allow_sandbox,
        agents,
        accounts,
        repositories,
        budget: BudgetLimits {
            max_turns,
            max_total_tokens: max_total_tokens.map(Tokens),
            max_cost_usd,
            deadline,
            ..BudgetLimits::default()
        },
        max_runs: wanted.max_runs,
        max_queued_runs: wanted.max_queued_runs,
        max_cost_usd_total,
        max_cost_usd_per_day,
    };
    // The terms are checked before the database is created: an invalid request must leave no file.
    terms.validate().map_err(flagged)?;
    if wanted.ttl.is_some_and(|ttl| ttl.is_zero() || ttl > MAX_TTL) {
        bail!("--ttl is from 1s to 10y; leave it out for a grant that does not end by itself");
    }
    let now = SystemTime::now();
    let expires = wanted.ttl.map(|ttl| now + ttl);
    check_agents(&terms.agents, &wanted.catalog, &place)?;
    check_repositories(&terms.repositories)?;
    let (grant, token) = open_store(&place)?.mint_grant(&name, terms, expires).await?;
    // The token is printed only here; a lost token cannot be displayed again.
    if wanted.json {
        let mut all = grant_json(&grant, now);
        all["token"] = token.expose_secret().into();
        writeln!(out, "{all}")?;
    } else {
        writeln!(out, "{}", token.expose_secret())?;
    }
    Ok(())
}

async fn list_grants(
    grants: &GrantStore,
    all: bool,
    json: bool,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let now = SystemTime::now();
    let mut grants = grants.list_grants().await?;
    // An expired or revoked grant is listed only with `--all`.
    grants.retain(|grant| all || grant.check_valid_at(now).is_ok());
    if json {
        return Ok(grants
            .iter()
            .try_for_each(|grant| writeln!(out, "{}", grant_json(grant, now)))?);
    }
    // The hint is for people only; JSON output stays empty.
    if grants.is_empty() {
        writeln!(out, "there is no grant; `cogni-gateway grant mint` makes one")?;
    }
    for grant in &grants {
        let access: Vec<_> = grant.terms.access.iter().map(|access| access.as_str()).collect();
        let used = grant
            .used
            .map_or_else(|| "never used".to_owned(), |used| format!("used {}", format_date(used)));
        let AccessGrant { id, name, .. } = grant;
        writeln!(
            out,
            "{id}  {:<8} {name}: {}; {used}",
            grant_state(grant, now),
            access.join(", ")
        )?;
    }
    Ok(())
}

async fn show_grant(place: &GrantStoreArgs, id: &str) -> anyhow::Result<Value> {
    let grant = find(place)?.find_grant(id).await?;
    let mut all = grant_json(&grant, SystemTime::now());
    let GrantTerms { max_cost_usd_total: total, max_cost_usd_per_day: per_day, .. } = grant.terms;
    let caps = SpendingCaps { total, per_day };
    // Reading the run records is only needed for caps.
    if !caps.is_none() {
        let file = place.state_dir()?.join("state.db");
        let run_store = RunStore::new(SqliteDatabase::open_database(&file, &[store::SCHEMA])?);
        all["money"] = spending_json(&caps, &run_store.spending_status(id).await?);
    }
    Ok(all)
}

/// Formats a grant's spending caps, with the charged, the reserved and the remaining amount.
fn spending_json(caps: &SpendingCaps, standing: &SpendingStatus) -> Value {
    let of = |cap: Nanodollars, spending: &GrantSpending| {
        json!({
            "cap_usd": cap,
            "charged_usd": spending.charged,
            "reserved_usd": spending.reserved,
            "left_usd": cap.saturating_sub(spending.sum()),
        })
    };
    json!({
        "total": caps.total.map(|cap| of(cap, &standing.total)),
        "today": caps.per_day.map(|cap| of(cap, &standing.today)),
        "day_ends": standing.day_ends.map(format_date),
    })
}

/// Formats an error in the terms, with the flag that corrects it.
fn flagged(invalid: GrantTermsError) -> anyhow::Error {
    let flag = match invalid {
        GrantTermsError::NoAccess => "--access",
        GrantTermsError::NoAgents => "--agent NAME",
        GrantTermsError::NoAccounts => "--account ACCOUNT",
        GrantTermsError::SandboxRequired => "--allow-sandbox",
        GrantTermsError::ZeroRuns => "--max-runs",
        GrantTermsError::ZeroCap => "--max-cost-usd-total, --max-cost-usd-per-day",
        GrantTermsError::ZeroDeadline => "--deadline",
        GrantTermsError::AmbiguousRepositoryPattern => "--repo",
        GrantTermsError::InvalidName => "--name",
    };
    anyhow!("{invalid} (`{flag}`)")
}

/// Checks that each pattern matches an agent in the service's catalog.
fn check_agents(
    patterns: &[GrantPattern],
    given: &AgentsDirArgs,
    place: &GrantStoreArgs,
) -> anyhow::Result<()> {
    let serve = place.serve()?;
    // The service's file may name another catalog than this command's default.
    let catalog = given.catalog_of(serve.and_then(|serve| serve.agents_dir))?;
    let known: Vec<_> = catalog.entries().map(|entry| entry.name.as_str()).collect();
    let is_known = |pattern: &&GrantPattern| known.iter().any(|name| pattern.matches(name));
    let Some(unknown) = patterns.iter().find(|pattern| !is_known(pattern)) else { return Ok(()) };
    bail!(
        "`--agent {unknown}` names no agent of the catalog, which has `{}`; give one of these or `*`, or name the \
         service's catalog with `--agents-dir`",
        known.join("`, `")
    )
}

/// Checks that each pattern can match a repository, all repositories of an owner or a host, or all repositories.
fn check_repositories(patterns: &[GrantPattern]) -> anyhow::Result<()> {
    let is_sound = |pattern: &&GrantPattern| {
        let text = pattern.as_str();
        let Some(prefix) = text.strip_suffix('*') else {
            // The service compares the pattern with the normalized URL, so that another spelling would never match.
            return RepositoryUrl::parse(text).is_ok_and(|found| {
                found.clone_url().trim_end_matches(".git") == text.trim_end_matches(".git")
            });
        };
        let has_scheme = ["https://", "http://", "file:///"].iter().any(|s| prefix.starts_with(s));
        // `*` alone matches every repository.
        prefix.is_empty() || has_scheme
    };
    let Some(malformed) = patterns.iter().find(|pattern| !is_sound(pattern)) else {
        return Ok(());
    };
    let hint = match RepositoryUrl::parse(malformed.as_str()) {
        Ok(found) => format!("give `{}`", found.clone_url().trim_end_matches(".git")),
        Err(_) => {
            "give `https://HOST/OWNER/NAME`, `https://HOST/OWNER/*` or `file:///PATH`".to_owned()
        }
    };
    bail!("`--repo {malformed}` names no repository; {hint}")
}

/// Opens the existing grants. Listing grants must not create a database.
fn find(place: &GrantStoreArgs) -> anyhow::Result<GrantStore> {
    let file = place.state_dir()?.join("state.db");
    if !file.exists() {
        bail!(
            "no grants found: `{}` does not exist; see `--state-dir`, or make a grant with `cogni-gateway grant mint`",
            file.display()
        );
    }
    open_store(place)
}

fn open_store(place: &GrantStoreArgs) -> anyhow::Result<GrantStore> {
    Ok(GrantStore::new(SqliteDatabase::open_database(
        &place.state_dir()?.join("state.db"),
        &[auth::GRANT_SCHEMA],
    )?))
}

impl GrantStoreArgs {
    /// Returns the state directory by the same rules as the service.
    fn state_dir(&self) -> anyhow::Result<PathBuf> {
        if let Some(given) = self.state.explicit_path() {
            return Ok(given);
        }
        Ok(self.serve()?.unwrap_or_default().state_directory())
    }

    /// Returns the service's settings if its file is given.
    fn serve(&self) -> anyhow::Result<Option<ServiceConfig>> {
        let file = self.config.as_deref().filter(|file| !file.as_os_str().is_empty());
        let Some(config) = file.map(GatewayConfig::read_file).transpose()? else { return Ok(None) };
        ServiceConfig::from_gateway_config(&config)
    }
}

fn grant_json(grant: &AccessGrant, now: SystemTime) -> Value {
    let AccessGrant { id, name, terms, created, expires, revoked, used } = grant;
    json!({
        "id": id,
        "name": name,
        "state": grant_state(grant, now),
        "terms": terms,
        "created": format_date(*created),
        "expires": expires.map(format_date),
        "revoked": revoked.map(format_date),
        "used": used.map(format_date),
    })
}

fn grant_state(grant: &AccessGrant, now: SystemTime) -> &'static str {
    match grant.check_valid_at(now) {
        Ok(()) => "good",
        // Revocation is the more important fact if both apply.
        Err(_) if grant.revoked.is_some() => "revoked",
        Err(_) => "expired",
    }
}

fn parse_dollars(given: &str) -> Result<Nanodollars, &'static str> {
    Nanodollars::parse(given).ok_or("give an amount of dollars, such as 2.50")
}

fn format_date(time: SystemTime) -> String {
    timestamp::format_rfc3339_seconds(time).to_string()
}

/// The longest validity of a grant. Our choice: a grant for more than ten years should not expire at all.
const MAX_TTL: Duration = Duration::from_hours(10 * 8766);
