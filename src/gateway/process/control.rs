//! Changing what a served run is judged by, while it is served.
//!
//! A change is checked as a whole and put in force at once; after an error everything is as it was.
//! Calls that are open end under the policy they began under, and what is spent stays spent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, bail};

use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::policy::{GatewayPolicy, SharedPolicy};
use crate::gateway::pipeline::rule::RuleSet;
use crate::gateway::run::AgentRun;
use crate::gateway::upstream::headers::InjectedHeaders;
use crate::llm::budget::PriceTable;
use crate::telemetry::audit::records::PolicyChangedRecord;

/// A handle on a served run, for its operator.
pub struct ServedRunHandle {
    run: Arc<AgentRun>,
    policy: Arc<SharedPolicy>,
    state: Mutex<ServedRunState>,
}

struct ServedRunState {
    /// What is in force.
    config: GatewayConfig,
    /// What was read last, without an operator's changes to this run.
    given: GatewayConfig,
    /// How often it has been changed.
    version: u64,
}

/// Where a change comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeSource {
    /// SIGHUP: the files were read again.
    Signal,
    /// The admin socket.
    Admin,
}

impl ServedRunHandle {
    pub(super) fn new(
        run: Arc<AgentRun>,
        policy: Arc<SharedPolicy>,
        config: GatewayConfig,
    ) -> Self {
        let given = config.clone();
        Self { run, policy, state: Mutex::new(ServedRunState { config, given, version: 0 }) }
    }

    /// Changes the configuration in force, and returns how often that has been done.
    ///
    /// # Errors
    /// What is wrong with the new one, or cannot change while a run is served; nothing has changed.
    pub fn change_config(
        &self,
        by: ChangeSource,
        change: impl FnOnce(&mut GatewayConfig) -> anyhow::Result<()>,
    ) -> anyhow::Result<u64> {
        let mut state = self.lock_state();
        let mut config = state.config.clone();
        change(&mut config)?;
        config.validate()?;
        check_immutable_settings(&state.config, &config)?;
        let policy = compile_policy(&config)?;
        Ok(self.swap_policy(&mut state, by, config, policy))
    }

    /// Says whether a configuration may follow the one in force.
    ///
    /// # Errors
    /// What cannot change while a run is served.
    pub(super) fn check_change(&self, config: &GatewayConfig) -> anyhow::Result<()> {
        check_immutable_settings(&self.lock_state().config, config)
    }

    /// Lays over a configuration that is read again what an operator has changed of this run: limits, models and aliases.
    pub(super) fn merge_operator_changes(&self, fresh: &GatewayConfig) -> GatewayConfig {
        let state = self.lock_state();
        let (set, old) = (&state.config, &state.given);
        let mut config = fresh.clone();
        config.budget = set.budget.merge_operator_limits(&old.budget, &fresh.budget);
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
    pub(super) fn install_config(
        &self,
        by: ChangeSource,
        given: GatewayConfig,
        (config, policy): (GatewayConfig, GatewayPolicy),
    ) {
        let mut state = self.lock_state();
        state.given = given;
        self.swap_policy(&mut state, by, config, policy);
    }

    fn swap_policy(
        &self,
        state: &mut ServedRunState,
        by: ChangeSource,
        config: GatewayConfig,
        policy: GatewayPolicy,
    ) -> u64 {
        state.version += 1;
        let (version, digest) = (state.version, config.digest());
        self.run.audit.record_operator_action(&PolicyChangedRecord {
            version,
            policy: &digest,
            prices: policy.prices.digest(),
            by: by.as_str(),
        });
        self.policy.store(Arc::new(policy));
        self.run.ledger.set_limits(config.budget.clone());
        state.config = config;
        let run = &*self.run.identity.run;
        tracing::info!(run, version, by = by.as_str(), "the policy has changed");
        version
    }

    /// Tells whether an operator's changes to this run are in force beside what was read.
    pub fn is_overridden(&self) -> bool {
        let state = self.lock_state();
        state.config != state.given
    }

    /// What is in force, and how often it has been changed.
    pub fn config_and_version(&self) -> (GatewayConfig, u64) {
        let state = self.lock_state();
        (state.config.clone(), state.version)
    }

    pub fn run(&self) -> &Arc<AgentRun> {
        &self.run
    }

    fn lock_state(&self) -> MutexGuard<'_, ServedRunState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ChangeSource {
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
pub fn compile_policy(config: &GatewayConfig) -> anyhow::Result<GatewayPolicy> {
    let overwrites =
        InjectedHeaders::new(&config.upstream, &config.identity, &config.policy.headers)?;
    let prices = PriceTable::load_table(&config.prices).context("the prices cannot be used")?;
    Ok(GatewayPolicy {
        config: Arc::new(config.policy.with_granted_betas()),
        rules: Arc::new(RuleSet::compile_rules(&config.policy.rules)?),
        prices: Arc::new(prices),
        overwrites: Arc::new(overwrites),
    })
}

/// The policy of a run that is configured much like another. What both have in common is shared: prices are those that
/// were read for the other.
///
/// # Errors
/// What is the run's own cannot be read, or does not hold together.
pub(super) fn compile_policy_sharing(
    (like, policy): (&GatewayConfig, &GatewayPolicy),
    config: &GatewayConfig,
) -> anyhow::Result<GatewayPolicy> {
    if like.prices != config.prices {
        return compile_policy(config);
    }
    let mut policy = policy.clone();
    if like.policy.rules != config.policy.rules {
        policy.rules = Arc::new(RuleSet::compile_rules(&config.policy.rules)?);
    }
    if like.policy != config.policy {
        policy.config = Arc::new(config.policy.with_granted_betas());
    }
    let overwrites =
        InjectedHeaders::new(&config.upstream, &config.identity, &config.policy.headers)?;
    policy.overwrites = Arc::new(overwrites);
    Ok(policy)
}

/// Sockets are bound, files are open, and records say who the run is: these cannot change under it.
pub(super) fn check_immutable_settings(
    old: &GatewayConfig,
    new: &GatewayConfig,
) -> anyhow::Result<()> {
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
