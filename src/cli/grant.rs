//! `cogni-gateway grant`: who may ask the service for what, beside the running service or before its first start.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{anyhow, bail};
use clap::Subcommand;
use serde_json::{Value, json};

use super::relay::StateDir;
use super::run::Agents;
use crate::base::db::Database;
use crate::budget::{Limits, Nanodollars, Tokens};
use crate::config::{Config, Serve};
use crate::grant::{self, Access, Grant, Grants, Invalid, Pattern, Terms};
use crate::journal::{self, Caps, Journal, Spending, Standing};
use crate::relay::repository::Repository;

/// Where the service has them.
#[derive(Debug, clap::Args)]
pub struct Place {
    #[command(flatten)]
    state: StateDir,

    /// The service's file: its `serve.state_dir` counts where no other is given
    #[arg(long, value_name = "FILE", env = "CONFIG")]
    config: Option<PathBuf>,
}

/// What can be done with grants.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a grant, and print its token, which is shown this once
    Mint(Box<Mint>),
    /// Show all grants
    List {
        #[command(flatten)]
        place: Place,

        /// Those that are worth nothing any more, too
        #[arg(long)]
        all: bool,

        /// A line of JSON for each
        #[arg(long)]
        json: bool,
    },
    /// Show one grant, all that it allows, and what is left of its money
    Show {
        #[command(flatten)]
        place: Place,

        /// The grant, as `grant list` names it
        id: String,
    },
    /// Make a grant worthless; a running service knows within half a second
    Revoke {
        #[command(flatten)]
        place: Place,

        /// The grant, as `grant list` names it
        id: String,

        /// End its runs that are under way, too; a running service does so within some seconds
        #[arg(long)]
        cancel_runs: bool,
    },
}

/// The terms of a new grant.
#[derive(Debug, clap::Args)]
pub struct Mint {
    #[command(flatten)]
    place: Place,

    /// Who has it, for people
    #[arg(long)]
    name: String,

    /// What it is for: read, runs, billing, admin
    #[arg(long, value_name = "KIND,…", value_delimiter = ',', default_value = "read,runs")]
    access: Vec<Access>,

    /// Let it run agents in sandboxes
    #[arg(long)]
    allow_sandbox: bool,

    /// An agent that it may run, such as `sandbox:agent`; a `*` at the end stands for any rest
    #[arg(long = "agent", value_name = "NAME")]
    agents: Vec<Pattern>,

    /// Who may be made to pay; the first does where nobody is named
    #[arg(long = "account", value_name = "ACCOUNT")]
    accounts: Vec<Pattern>,

    /// A repository that it may have worked on, such as `https://github.com/acme/*`
    #[arg(long = "repo", value_name = "URL")]
    repositories: Vec<Pattern>,

    /// When it ends by itself, such as 90d [default: never]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::time)]
    ttl: Option<Duration>,

    /// Runs that it may have at the same time
    #[arg(long, value_name = "COUNT", value_parser = crate::cli::flags::count::<u32>)]
    max_runs: Option<u32>,

    /// The grant and its token as JSON, in place of the token alone
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    catalog: Agents,

    #[command(flatten)]
    budget: Budget,

    #[command(flatten)]
    money: Money,
}

/// What one run may spend at most.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "What one run may spend at most")]
struct Budget {
    /// Calls that make a model generate
    #[arg(long, value_name = "COUNT", value_parser = crate::cli::flags::count::<u64>)]
    max_turns: Option<u64>,

    /// Tokens in and out together
    #[arg(long, value_name = "COUNT", value_parser = crate::cli::flags::count::<u64>)]
    max_total_tokens: Option<u64>,

    /// Money, by the price table
    #[arg(long, value_name = "DOLLARS", value_parser = dollars)]
    max_cost_usd: Option<Nanodollars>,

    /// How long it may last
    #[arg(long, value_name = "TIME", value_parser = crate::cli::flags::time)]
    deadline: Option<Duration>,
}

/// What all its runs may spend together.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "What all its runs may spend together")]
struct Money {
    /// Money of all its runs, by the price table [default: no limit]
    #[arg(long, value_name = "DOLLARS", value_parser = dollars)]
    max_cost_usd_total: Option<Nanodollars>,

    /// Money of the runs of one day (UTC) [default: no limit]
    #[arg(long, value_name = "DOLLARS", value_parser = dollars)]
    max_cost_usd_per_day: Option<Nanodollars>,
}

/// Runs the command.
pub fn run(command: Command, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(async {
        match command {
            Command::Mint(wanted) => mint(*wanted, out).await?,
            Command::List { place, all, json } => list(&find(&place)?, all, json, out).await?,
            Command::Show { place, id } => {
                writeln!(out, "{:#}", show(&place, &id).await?)?;
            }
            Command::Revoke { place, id, cancel_runs } => {
                let grants = find(&place)?;
                let grant = if cancel_runs {
                    grants.revoke_with_runs(&id).await?
                } else {
                    grants.revoke(&id).await?
                };
                writeln!(out, "{} ({}) is revoked", grant.id, grant.name)?;
            }
        }
        Ok(ExitCode::SUCCESS)
    })
}

async fn mint(wanted: Mint, out: &mut impl Write) -> anyhow::Result<()> {
    let Mint { place, name, access, allow_sandbox, agents, accounts, repositories, .. } = wanted;
    let Budget { max_turns, max_total_tokens, max_cost_usd, deadline } = wanted.budget;
    let Money { max_cost_usd_total, max_cost_usd_per_day } = wanted.money;
    let terms = Terms {
        access: access.into_iter().collect(),
        allow_sandbox,
        agents,
        accounts,
        repositories,
        budget: Limits {
            max_turns,
            max_total_tokens: max_total_tokens.map(Tokens),
            max_cost_usd,
            deadline,
            ..Limits::default()
        },
        max_runs: wanted.max_runs,
        max_cost_usd_total,
        max_cost_usd_per_day,
    };
    // Before the file is made: who asks for nonsense should leave nothing.
    terms.check().map_err(flagged)?;
    if wanted.ttl.is_some_and(|ttl| ttl.is_zero() || ttl > MAX_TTL) {
        bail!("--ttl is from 1s to 10y; leave it out for a grant that does not end by itself");
    }
    let now = SystemTime::now();
    let expires = wanted.ttl.map(|ttl| now + ttl);
    check_agents(&terms.agents, &wanted.catalog, &place)?;
    check_repositories(&terms.repositories)?;
    let (grant, token) = open(&place)?.mint(&name, terms, expires).await?;
    if wanted.json {
        let mut all = described(&grant, now);
        all["token"] = token.expose().into();
        writeln!(out, "{all}")?;
    } else {
        writeln!(out, "{}", token.expose())?;
    }
    Ok(())
}

async fn list(grants: &Grants, all: bool, json: bool, out: &mut impl Write) -> anyhow::Result<()> {
    let now = SystemTime::now();
    let mut grants = grants.list().await?;
    grants.retain(|grant| all || grant.check_at(now).is_ok());
    if json {
        return Ok(grants
            .iter()
            .try_for_each(|grant| writeln!(out, "{}", described(grant, now)))?);
    }
    if grants.is_empty() {
        writeln!(out, "there is no grant; `cogni-gateway grant mint` makes one")?;
    }
    for grant in &grants {
        let access: Vec<_> = grant.terms.access.iter().map(|access| access.as_str()).collect();
        let used = grant
            .used
            .map_or_else(|| "never used".to_owned(), |used| format!("used {}", date(used)));
        let Grant { id, name, .. } = grant;
        writeln!(out, "{id}  {:<8} {name}: {}; {used}", state(grant, now), access.join(", "))?;
    }
    Ok(())
}

async fn show(place: &Place, id: &str) -> anyhow::Result<Value> {
    let grant = find(place)?.show(id).await?;
    let mut all = described(&grant, SystemTime::now());
    let Terms { max_cost_usd_total: total, max_cost_usd_per_day: per_day, .. } = grant.terms;
    let caps = Caps { total, per_day };
    if !caps.is_none() {
        let file = place.path()?.join("state.db");
        let journal = Journal::new(Database::open(&file, &[journal::SCHEMA])?);
        all["money"] = money(&caps, &journal.standing(id).await?);
    }
    Ok(all)
}

/// A grant's caps of money, and what is left of them.
fn money(caps: &Caps, standing: &Standing) -> Value {
    let of = |cap: Nanodollars, spending: &Spending| {
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
        "day_ends": standing.day_ends.map(date),
    })
}

/// What is wrong with terms, with the flag that mends it.
fn flagged(invalid: Invalid) -> anyhow::Error {
    let flag = match invalid {
        Invalid::Access => "--access",
        Invalid::Agents => "--agent NAME",
        Invalid::Accounts => "--account ACCOUNT",
        Invalid::Sandbox => "--allow-sandbox",
        Invalid::MaxRuns => "--max-runs",
        Invalid::Cap => "--max-cost-usd-total, --max-cost-usd-per-day",
        Invalid::Repositories => "--repo",
        Invalid::Name => "--name",
    };
    anyhow!("{invalid} (`{flag}`)")
}

/// Checks that each pattern names an agent of the catalog that the service has.
fn check_agents(patterns: &[Pattern], given: &Agents, place: &Place) -> anyhow::Result<()> {
    let serve = place.serve()?;
    let catalog = given.catalog_of(serve.and_then(|serve| serve.agents_dir))?;
    let known: Vec<_> = catalog.entries().map(|entry| entry.name.as_str()).collect();
    let is_known = |pattern: &&Pattern| known.iter().any(|name| pattern.matches(name));
    let Some(unknown) = patterns.iter().find(|pattern| !is_known(pattern)) else { return Ok(()) };
    bail!(
        "`--agent {unknown}` names no agent of the catalog, which has `{}`; give one of them or `*`, or name the \
         service's catalog with `--agents-dir`",
        known.join("`, `")
    )
}

/// Checks that each pattern can name a repository, or all of an owner's, of a host's or all there are.
fn check_repositories(patterns: &[Pattern]) -> anyhow::Result<()> {
    let is_sound = |pattern: &&Pattern| {
        let text = pattern.as_str();
        let Some(beginning) = text.strip_suffix('*') else {
            // The service compares it with the one spelling that every URL has there.
            return Repository::parse(text).is_ok_and(|found| {
                found.clone_url().trim_end_matches(".git") == text.trim_end_matches(".git")
            });
        };
        let has_scheme =
            ["https://", "http://", "file:///"].iter().any(|s| beginning.starts_with(s));
        beginning.is_empty() || has_scheme
    };
    let Some(malformed) = patterns.iter().find(|pattern| !is_sound(pattern)) else {
        return Ok(());
    };
    let hint = match Repository::parse(malformed.as_str()) {
        Ok(meant) => format!("give `{}`", meant.clone_url().trim_end_matches(".git")),
        Err(_) => {
            "give `https://HOST/OWNER/NAME`, `https://HOST/OWNER/*` or `file:///PATH`".to_owned()
        }
    };
    bail!("`--repo {malformed}` names no repository; {hint}")
}

/// The grants that there are. To look at them is not to make a place for them.
fn find(place: &Place) -> anyhow::Result<Grants> {
    let file = place.path()?.join("state.db");
    if !file.exists() {
        bail!(
            "there are no grants here: there is no `{}`; see `--state-dir`, or make one with `cogni-gateway grant mint`",
            file.display()
        );
    }
    open(place)
}

fn open(place: &Place) -> anyhow::Result<Grants> {
    Ok(Grants::new(Database::open(&place.path()?.join("state.db"), &[grant::SCHEMA])?))
}

impl Place {
    /// As the service itself finds it.
    fn path(&self) -> anyhow::Result<PathBuf> {
        if let Some(given) = self.state.given() {
            return Ok(given);
        }
        Ok(self.serve()?.unwrap_or_default().state_dir())
    }

    /// The settings of the service, where its file is given.
    fn serve(&self) -> anyhow::Result<Option<Serve>> {
        let file = self.config.as_deref().filter(|file| !file.as_os_str().is_empty());
        Ok(file.map(Config::read).transpose()?.and_then(|config| config.serve))
    }
}

fn described(grant: &Grant, now: SystemTime) -> Value {
    let Grant { id, name, terms, created, expires, revoked, used } = grant;
    json!({
        "id": id,
        "name": name,
        "state": state(grant, now),
        "terms": terms,
        "created": date(*created),
        "expires": expires.map(date),
        "revoked": revoked.map(date),
        "used": used.map(date),
    })
}

fn state(grant: &Grant, now: SystemTime) -> &'static str {
    match grant.check_at(now) {
        Ok(()) => "good",
        Err(_) if grant.revoked.is_some() => "revoked",
        Err(_) => "expired",
    }
}

fn dollars(given: &str) -> Result<Nanodollars, &'static str> {
    Nanodollars::parse(given).ok_or("give an amount of dollars, such as 2.50")
}

fn date(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Ours: who needs more than that means one that does not end.
const MAX_TTL: Duration = Duration::from_hours(10 * 8766);
