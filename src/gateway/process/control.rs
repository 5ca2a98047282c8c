//! Changes the policy and the limits of a run while the run is served.
//!
//! A change is checked as a whole and put in force at once. After an error everything is as before. Open calls end
//! under the policy that they started under, and the amount spent stays spent.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, bail};

use crate::gateway::config::GatewayConfig;
use crate::gateway::pipeline::policy::{GatewayPolicy, SharedPolicy};
use crate::gateway::pipeline::rule::RuleSet;
use crate::gateway::run::AgentRun;
use crate::gateway::upstream::headers::InjectedHeaders;
use crate::llm::budget::PriceTable;
use crate::telemetry::audit::records::PolicyChangedRecord;

/// The operator's handle on a served run.
pub struct ServedRunHandle {
    run: Arc<AgentRun>,
    policy: Arc<SharedPolicy>,
    state: Mutex<ServedRunState>,
}

/// The configurations of a served run and the number of changes.
struct ServedRunState {
    /// The configuration in force.
    config: GatewayConfig,
    /// The configuration that was read last, without an operator's changes to this run.
    given: GatewayConfig,
    /// The number of changes so far.
    version: u64,
}

/// The origin of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeSource {
    /// SIGHUP: the process reads the files again.
    Signal,
    /// A request on the admin socket.
    Admin,
}

impl ServedRunHandle {
    pub(super) fn new(
        run: Arc<AgentRun>,
        policy: Arc<SharedPolicy>,
        config: GatewayConfig,
    ) -> Self {
        let read_config = config.clone();
        Self {
            run,
            policy,
            state: Mutex::new(ServedRunState { config, given: read_config, version: 0 }),
        }
    }

    /// Changes the configuration in force, and returns the number of changes so far.
    ///
    /// # Errors
    /// Returns an error if the new configuration is not valid, or changes a setting that cannot change while a run is
    /// served. In this case nothing has changed.
    pub fn change_config(
        &self,
        by: ChangeSource,
        change: impl FnOnce(&mut GatewayConfig) -> anyhow::Result<()>,
    ) -> anyhow::Result<u64> {
        // The lock is held over the whole change. Two changes at once would otherwise lose one of them.
        let mut state = self.lock_state();
        // The change works on a copy, so an error leaves the configuration in force untouched.
        let mut config = state.config.clone();
        change(&mut config)?;
        config.validate()?;
        check_immutable_settings(&state.config, &config)?;
        let policy = compile_policy(&config)?;
        Ok(self.swap_policy(&mut state, by, config, policy))
    }

    /// Checks that a configuration may follow the configuration in force.
    ///
    /// # Errors
    /// Returns an error that names a setting that cannot change while a run is served.
    pub(super) fn check_change(&self, config: &GatewayConfig) -> anyhow::Result<()> {
        check_immutable_settings(&self.lock_state().config, config)
    }

    /// Returns a configuration that was read again, with the operator's changes to this run applied: limits, models and
    /// aliases.
    pub(super) fn merge_operator_changes(&self, new_config: &GatewayConfig) -> GatewayConfig {
        let state = self.lock_state();
        // An operator's change is a difference between the configuration in force and the one that was read last.
        let (set, old) = (&state.config, &state.given);
        let mut config = new_config.clone();
        // A limit that an operator has changed stays, but it never becomes more than the file allows.
        config.budget = set.budget.merge_operator_limits(&old.budget, &new_config.budget);
        let (body, set, old) = (&mut config.policy.body, &set.policy.body, &old.policy.body);
        if set.models != old.models {
            body.models.clone_from(&set.models);
        }
        if set.aliases != old.aliases {
            body.aliases.clone_from(&set.aliases);
        }
        if config != *new_config {
            let run = &*self.run.identity.run;
            tracing::warn!(run, "an operator's changes to this run stay in force after the reload");
        }
        config
    }

    /// Puts a checked configuration in force, with the policy that it describes. `read_config` is the configuration as
    /// it was read, without an operator's changes.
    pub(super) fn install_config(
        &self,
        by: ChangeSource,
        read_config: GatewayConfig,
        (config, policy): (GatewayConfig, GatewayPolicy),
    ) {
        let mut state = self.lock_state();
        state.given = read_config;
        self.swap_policy(&mut state, by, config, policy);
    }

    /// Records a change, then puts the policy, the limits and the configuration in force. Returns the new version.
    fn swap_policy(
        &self,
        state: &mut ServedRunState,
        by: ChangeSource,
        config: GatewayConfig,
        policy: GatewayPolicy,
    ) -> u64 {
        state.version += 1;
        let (version, digest) = (state.version, config.digest());
        // The record comes before the change: every call under the new policy has the policy's digest before it in the
        // log.
        self.run.audit.record_operator_action(&PolicyChangedRecord {
            version,
            policy: &digest,
            prices: policy.prices.digest(),
            by: by.as_str(),
        });
        // Calls read the policy once at their start, so open calls keep the old one.
        self.policy.store(Arc::new(policy));
        self.run.ledger.set_limits(config.budget.clone());
        state.config = config;
        let run = &*self.run.identity.run;
        tracing::info!(run, version, by = by.as_str(), "the policy has changed");
        version
    }

    /// Returns true if an operator's changes to this run are in force.
    pub fn is_overridden(&self) -> bool {
        let state = self.lock_state();
        state.config != state.given
    }

    /// Returns the configuration in force, and the number of changes so far.
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

/// Compiles the policy that a configuration describes.
///
/// # Errors
/// Returns an error if a file that the configuration names cannot be read, or if the policy contradicts itself.
pub fn compile_policy(config: &GatewayConfig) -> anyhow::Result<GatewayPolicy> {
    let injected_headers =
        InjectedHeaders::new(&config.upstream, &config.identity, &config.policy.headers)?;
    let prices = PriceTable::load_table(&config.prices).context("the prices cannot be used")?;
    Ok(GatewayPolicy {
        config: Arc::new(config.policy.with_granted_betas()),
        rules: Arc::new(RuleSet::compile_rules(&config.policy.rules)?),
        prices: Arc::new(prices),
        injected_headers: Arc::new(injected_headers),
    })
}

/// Compiles the policy of a run that is configured much like another run. The two policies share their common parts. If
/// both configure the same prices, the prices are those that were read for the other run.
///
/// # Errors
/// Returns an error if the run's own part cannot be read, or contradicts itself.
pub(super) fn compile_policy_sharing(
    (like, policy): (&GatewayConfig, &GatewayPolicy),
    config: &GatewayConfig,
) -> anyhow::Result<GatewayPolicy> {
    // Other prices are rare. Everything is read then, as for a first run.
    if like.prices != config.prices {
        return compile_policy(config);
    }
    // Cloning copies four counted references, not the tables behind them.
    let mut policy = policy.clone();
    if like.policy.rules != config.policy.rules {
        policy.rules = Arc::new(RuleSet::compile_rules(&config.policy.rules)?);
    }
    if like.policy != config.policy {
        policy.config = Arc::new(config.policy.with_granted_betas());
    }
    // The headers carry the run's identity, so they are never shared.
    let injected_headers =
        InjectedHeaders::new(&config.upstream, &config.identity, &config.policy.headers)?;
    policy.injected_headers = Arc::new(injected_headers);
    Ok(policy)
}

/// Checks that a change leaves the immutable settings alone. Sockets are bound, files are open, and the records carry
/// the run's identity, so these settings cannot change under a run.
pub(super) fn check_immutable_settings(
    old: &GatewayConfig,
    new: &GatewayConfig,
) -> anyhow::Result<()> {
    let changed = [
        ("the run's identity", old.identity != new.identity),
        ("`listen`", old.listen != new.listen),
        ("`server`", old.server != new.server),
        ("`upstream`", old.upstream != new.upstream),
        ("`tools`", old.tools != new.tools),
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
        Some((setting, _)) => {
            bail!(
                "{setting} cannot change while a run is served; restart for that, or take it back"
            )
        }
        None => Ok(()),
    }
}
