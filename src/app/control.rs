//! Changing what a served run is judged by, while it is served.
//!
//! A change is checked as a whole and put in force at once; after an error everything is as it was.
//! Calls that are open end under the policy they began under, and what is spent stays spent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, bail};

use crate::audit::record::Changed;
use crate::budget::Prices;
use crate::config::Config;
use crate::gateway::policy::{Live, Policy};
use crate::gateway::rule::Rules;
use crate::run::Run;
use crate::upstream::headers::Overwrites;

/// A handle on a served run, for its operator.
pub struct Control {
    run: Arc<Run>,
    policy: Arc<Live>,
    state: Mutex<State>,
}

struct State {
    /// What is in force.
    config: Config,
    /// What was read last, without an operator's changes to this run.
    given: Config,
    /// How often it has been changed.
    version: u64,
}

/// Where a change comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum By {
    /// SIGHUP: the files were read again.
    Signal,
    /// The admin socket.
    Admin,
}

impl Control {
    pub(super) fn new(run: Arc<Run>, policy: Arc<Live>, config: Config) -> Self {
        let given = config.clone();
        Self { run, policy, state: Mutex::new(State { config, given, version: 0 }) }
    }

    /// Changes the configuration in force, and returns how often that has been done.
    ///
    /// # Errors
    /// What is wrong with the new one, or cannot change while a run is served; nothing has changed.
    pub fn change(
        &self,
        by: By,
        change: impl FnOnce(&mut Config) -> anyhow::Result<()>,
    ) -> anyhow::Result<u64> {
        let mut state = self.state();
        let mut config = state.config.clone();
        change(&mut config)?;
        config.check()?;
        check_lasting(&state.config, &config)?;
        let policy = compile(&config)?;
        Ok(self.enforce(&mut state, by, config, policy))
    }

    /// Says whether a configuration may follow the one in force.
    ///
    /// # Errors
    /// What cannot change while a run is served.
    pub(super) fn check(&self, config: &Config) -> anyhow::Result<()> {
        check_lasting(&self.state().config, config)
    }

    /// Lays over a configuration that is read again what an operator has changed of this run: limits, models and aliases.
    pub(super) fn lay_over(&self, fresh: &Config) -> Config {
        let state = self.state();
        let (set, old) = (&state.config, &state.given);
        let mut config = fresh.clone();
        config.budget = set.budget.laid_over(&old.budget, &fresh.budget);
        let (body, set, old) = (&mut config.policy.body, &set.policy.body, &old.policy.body);
        if set.models != old.models {
            body.models.clone_from(&set.models);
        }
        if set.aliases != old.aliases {
            body.aliases.clone_from(&set.aliases);
        }
        if config != *fresh {
            let run = &*self.run.identity.run;
            tracing::warn!(run, "an operator's changes to this run stay in force after the reload");
        }
        config
    }

    /// Puts a configuration in force that was found good, with the policy that it describes. `given` is what was read,
    /// without an operator's changes.
    pub(super) fn put(&self, by: By, given: Config, (config, policy): (Config, Policy)) {
        let mut state = self.state();
        state.given = given;
        self.enforce(&mut state, by, config, policy);
    }

    fn enforce(&self, state: &mut State, by: By, config: Config, policy: Policy) -> u64 {
        state.version += 1;
        let (version, digest) = (state.version, config.digest());
        self.run.audit.operated(&Changed {
            version,
            policy: &digest,
            prices: policy.prices.digest(),
            by: by.as_str(),
        });
        self.policy.store(Arc::new(policy));
        self.run.ledger.change(config.budget.clone());
        state.config = config;
        let run = &*self.run.identity.run;
        tracing::info!(run, version, by = by.as_str(), "the policy has changed");
        version
    }

    /// Tells whether an operator's changes to this run are in force beside what was read.
    pub fn is_overridden(&self) -> bool {
        let state = self.state();
        state.config != state.given
    }

    /// What is in force, and how often it has been changed.
    pub fn config(&self) -> (Config, u64) {
        let state = self.state();
        (state.config.clone(), state.version)
    }

    pub fn run(&self) -> &Arc<Run> {
        &self.run
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl By {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Signal => "signal",
            Self::Admin => "admin",
        }
    }
}

/// The policy that a configuration describes.
///
/// # Errors
/// What it names cannot be read, or does not hold together.
pub fn compile(config: &Config) -> anyhow::Result<Policy> {
    let overwrites = Overwrites::new(&config.upstream, &config.identity, &config.policy.headers)?;
    let prices = Prices::load(&config.prices).context("the prices cannot be used")?;
    Ok(Policy {
        config: Arc::new(config.policy.with_granted_betas()),
        rules: Arc::new(Rules::compile(&config.policy.rules)?),
        prices: Arc::new(prices),
        overwrites: Arc::new(overwrites),
    })
}

/// The policy of a run that is configured much like another. What both have in common is shared: prices are those that
/// were read for the other.
///
/// # Errors
/// What is the run's own cannot be read, or does not hold together.
pub(super) fn compile_like(
    (like, policy): (&Config, &Policy),
    config: &Config,
) -> anyhow::Result<Policy> {
    if like.prices != config.prices {
        return compile(config);
    }
    let mut policy = policy.clone();
    if like.policy.rules != config.policy.rules {
        policy.rules = Arc::new(Rules::compile(&config.policy.rules)?);
    }
    if like.policy != config.policy {
        policy.config = Arc::new(config.policy.with_granted_betas());
    }
    let overwrites = Overwrites::new(&config.upstream, &config.identity, &config.policy.headers)?;
    policy.overwrites = Arc::new(overwrites);
    Ok(policy)
}

/// Sockets are bound, files are open, and records say who the run is: these cannot change under it.
pub(super) fn check_lasting(old: &Config, new: &Config) -> anyhow::Result<()> {
    let changed = [
        ("the run's identity", old.identity != new.identity),
        ("`listen`", old.listen != new.listen),
        ("`server`", old.server != new.server),
        ("`upstream`", old.upstream != new.upstream),
        ("`audit`", old.audit != new.audit),
        ("`access_log`", old.access_log != new.access_log),
        ("`access_log_max_bytes`", old.access_log_max_bytes != new.access_log_max_bytes),
        ("`admin`", old.admin != new.admin),
        ("`metrics`", old.metrics != new.metrics),
        ("`telemetry`", old.telemetry != new.telemetry),
        ("`workers`", old.workers != new.workers),
        ("`drain_timeout`", old.drain_timeout != new.drain_timeout),
    ];
    match changed.into_iter().find(|(_, has_changed)| *has_changed) {
        Some((what, _)) => {
            bail!("{what} cannot change while a run is served; restart for that, or take it back")
        }
        None => Ok(()),
    }
}
