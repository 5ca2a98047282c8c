//! `cogni-gateway forget`: what agents keep from run to run, and its end.

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};

use super::relay::StateDir;
use crate::delivery::OUTBOX;
use crate::delivery::outbox::Outbox;
use crate::runner::quota::Bytes;
use crate::runner::residents::kept::{self, Fate, Kept, Line, Shelf, Tenant};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    state: StateDir,

    /// What is to be forgotten; without one, all that the flags let through
    ids: Vec<String>,

    /// Only what this agent keeps
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,

    /// Only what nobody has used for so long
    #[arg(long, value_name = "DURATION", value_parser = crate::cli::flags::time)]
    older_than: Option<Duration>,

    /// Remove it; without this it is only shown
    #[arg(long)]
    apply: bool,
}

/// Exit status 1 where something is still there that was to go.
pub fn run(args: &Args, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    if args.apply && !args.chooses() {
        bail!(
            "`--apply` would forget everything; name what is to go, or give `--agent` or `--older-than`"
        );
    }
    let state = args.state.path();
    let shelf = Shelf::of(&state);
    let chosen = args.choose(shelf.list().with_context(|| cannot(&state))?)?;
    let outbox = state.join(OUTBOX);
    // To look is not to make one.
    let outbox = outbox.exists().then(|| Outbox::open(&outbox)).transpose()?;
    let is_awaited =
        |line: &Line| outbox.as_ref().is_some_and(|outbox| kept::is_under_way(outbox, line));
    let age = args.older_than.unwrap_or_default();
    let (mut left, mut gone) = (0, 0);
    for kept in &chosen {
        let size =
            shelf.measure(kept).map_or_else(|_| "?".to_owned(), |size| Bytes(size).to_string());
        let fate = if args.apply {
            shelf.forget(kept, age, is_awaited)
        } else {
            shelf.judge(kept, age, is_awaited)
        };
        match fate {
            Fate::Forgotten => gone += 1,
            Fate::Unused | Fate::Stuck(_) => left += 1,
            Fate::InUse | Fate::Awaited | Fate::Young => (),
        }
        writeln!(out, "{} {}: {}", kept.id, describe(kept, &size), word(&fate))?;
    }
    match (args.apply, left) {
        _ if chosen.is_empty() => {
            let what = if args.chooses() { "nothing of that" } else { "nothing" };
            writeln!(out, "{what} is kept in `{}`", state.display())?;
        }
        (true, _) => writeln!(out, "{gone} forgotten")?,
        (false, 0) => writeln!(out, "none can be forgotten")?,
        (false, left) if args.chooses() => {
            writeln!(out, "{left} can be forgotten; `--apply` does it")?;
        }
        (false, left) => writeln!(out, "{left} can be forgotten; name them, and `--apply`")?,
    }
    Ok(if args.apply && left > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

impl Args {
    fn chooses(&self) -> bool {
        !self.ids.is_empty() || self.agent.is_some() || self.older_than.is_some()
    }

    fn choose(&self, all: Vec<Kept>) -> anyhow::Result<Vec<Kept>> {
        if let Some(unknown) = self.ids.iter().find(|id| all.iter().all(|kept| kept.id != **id)) {
            bail!("nothing is kept as `{unknown}`; without a name, all that is kept is shown");
        }
        let is_chosen = |kept: &Kept| {
            let of_agent =
                |agent: &String| kept.tenant.as_ref().is_some_and(|tenant| tenant.agent == *agent);
            (self.ids.is_empty() || self.ids.contains(&kept.id))
                && self.agent.as_ref().is_none_or(of_agent)
                && self.older_than.is_none_or(|age| unused(kept) >= age)
        };
        Ok(all.into_iter().filter(is_chosen).collect())
    }
}

fn describe(kept: &Kept, size: &str) -> String {
    let whose = kept.tenant.as_ref().map(ToString::to_string);
    let whose = whose.unwrap_or_else(|| "of an earlier version".to_owned());
    let more = kept.tenant.as_ref().map(|tenant| {
        let Tenant { grant, account, kind, .. } = tenant;
        let said = [("grant", grant), ("account", account), ("by", kind)].into_iter();
        said.filter_map(|(what, text)| Some(format!(", {what} {}", text.as_ref()?))).collect()
    });
    let more: String = more.unwrap_or_default();
    let unused = Duration::from_secs(unused(kept).as_secs());
    format!("{whose}{more}, {size}, used {} ago", humantime::format_duration(unused))
}

fn unused(kept: &Kept) -> Duration {
    SystemTime::now().duration_since(kept.used).unwrap_or_default()
}

fn word(fate: &Fate) -> String {
    match fate {
        Fate::InUse => "in use".to_owned(),
        Fate::Awaited => "kept: the relay has work of this branch under way".to_owned(),
        Fate::Young => "kept: it was used meanwhile".to_owned(),
        Fate::Unused => "not in use".to_owned(),
        Fate::Forgotten => "forgotten".to_owned(),
        Fate::Stuck(error) => format!("cannot be removed: {error}"),
    }
}

fn cannot(state: &Path) -> String {
    format!("cannot read what is kept in `{}`", state.display())
}
