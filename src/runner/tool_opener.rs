//! Opens the tools of runs: the place where the gateway, the tools and the sandboxes meet.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ring::rand::{SecureRandom, SystemRandom};
use tokio_util::sync::CancellationToken;

use crate::base::host_lookups::{HostLookup, RunLookups, system_lookup};
use crate::gateway::run::control::NotAcceptingError;
use crate::gateway::run::{
    AgentRun, RunIdentity, ToolEndpoints, ToolOpener, ToolProcess, ToolSettings,
};
use crate::runner::agents::definition::AgentDefinition;
use crate::tools::agent_modes::{AgentModes, AgentToolLayer, COMMANDS_RULE, ToolGroups};
use crate::tools::approval::budget_questions::{BudgetQuestionParts, BudgetQuestions};
use crate::tools::approval::present_tools::{PresentTool, PresentTools};
use crate::tools::approval::store::ApprovalStore;
use crate::tools::approval::webhook::Webhook;
use crate::tools::approval::{OnBudget, OnDenial, RunApprovals};
use crate::tools::config::{McpServerConfig, ToolConfig, ToolConfigError};
use crate::tools::connection::environment::{connection_environment, listed_connections};
use crate::tools::connection::policy::{ConnectionHost, ConnectionPolicy};
use crate::tools::connection::tunnel::RunTunnels;
use crate::tools::connection::{ConnectionParts, RunConnections};
use crate::tools::credential_source::CredentialSource;
use crate::tools::job::JobRunner;
use crate::tools::mcp_server::{McpCommandHost, McpServer};
use crate::tools::policy::{GrantedTool, ToolPolicy};
use crate::tools::program::ToolPrograms;
use crate::tools::prometheus::PrometheusClient;
use crate::tools::refusal::ToolRefusal;
use crate::tools::rule_facts::ToolRunFacts;
use crate::tools::run_credentials::RunCredentials;
use crate::tools::run_tools::{RunSwitches, RunToolParts, RunTools};
use crate::tools::tool_file::{known_tools, read_tool_files};

/// Opens the tools of every run of this process.
#[derive(Clone, Default)]
pub struct RunToolOpener {
    /// The runner of tools that are files; `None` if this process makes no sandbox for the run.
    pub jobs: Option<Arc<dyn JobRunner>>,
    /// The place where people answer questions about calls; `None` if no person can answer in this process.
    pub approvals: Option<ApprovalStore>,
    /// The look-up of the hosts of connections; `None` stands for this machine's resolver.
    pub lookup: Option<HostLookup>,
}

/// The files of this machine that a table of tools names.
#[derive(Debug, Default)]
pub struct NamedToolFiles {
    /// The texts of tools and of the lock file.
    pub texts: BTreeMap<PathBuf, String>,
    /// The paths that decide what runs may call.
    pub decisive: Vec<PathBuf>,
    /// The paths of credentials.
    pub secret: Vec<PathBuf>,
}

impl NamedToolFiles {
    /// Reads the files that a table names, so that they change for later runs only if the configuration is read again.
    ///
    /// # Errors
    /// Returns an error that names the file, the key and the remedy.
    pub fn read_files(settings: &ToolSettings) -> anyhow::Result<Self> {
        let Some(table) = &settings.table else { return Ok(Self::default()) };
        let config = ToolConfig::from_table(table)?;
        let texts = read_tool_files(&config)?;
        let webhook = config.approvals.webhook.iter();
        let keys = webhook.flat_map(|webhook| {
            [Some(&webhook.secret), webhook.reply_secret.as_ref()].into_iter().flatten()
        });
        let of_servers = config.mcp.values().flat_map(McpServerConfig::credentials);
        let sources = of_servers.chain(keys);
        let secret = sources.filter_map(CredentialSource::file_path).map(Path::to_owned);
        let connections = config.connections.values();
        let of_connections =
            connections.clone().filter_map(|own| own.credential.as_ref()?.file.clone());
        let authorities = connections.filter_map(|own| own.ca_file.clone());
        let secret = secret.chain(of_connections).collect();
        let decisive =
            config.directory.iter().chain(&config.lock).cloned().chain(authorities).collect();
        Ok(Self { texts, decisive, secret })
    }
}

/// The parts of a run's tools that its settings decide.
#[derive(Debug)]
pub struct CompiledTools {
    pub config: ToolConfig,
    pub policy: ToolPolicy,
}

impl CompiledTools {
    /// Compiles the settings of a run's tools.
    ///
    /// # Errors
    /// Returns an error that names the key and the remedy.
    pub fn from_settings(settings: &ToolSettings) -> anyhow::Result<Self> {
        let table = settings.table.as_ref();
        let config = table.map(ToolConfig::from_table).transpose()?.unwrap_or_default();
        let agent = agent_layer(settings, &config)?;
        let tools = match &settings.files {
            Some(files) => known_tools(&config, files),
            None => known_tools(&config, &read_tool_files(&config)?),
        };
        let policy = ToolPolicy::compile_policy(&config, tools?, agent)?;
        Ok(Self { config, policy })
    }

    /// Returns the tools that an agent's list and modes leave. An agent that contradicts the configuration may call none.
    pub fn callable_tools(&self, agent: &AgentDefinition) -> BTreeSet<String> {
        let groups = ToolGroups::from_config(&self.config);
        let layer = groups
            .and_then(|groups| AgentToolLayer::resolve_layer(&agent.tools, agent.modes, groups));
        layer.as_ref().map(AgentToolLayer::callable_names).unwrap_or_default()
    }

    /// Returns the tools for calls that wait for a person. `agents` has the tools that each agent may call.
    pub fn to_present_tools(&self, agents: BTreeMap<String, BTreeSet<String>>) -> PresentTools {
        let describe = |tool: &GrantedTool| {
            let job = tool.definition.program.sandbox_job().cloned();
            let (definition, rules) = (tool.definition.digest.clone(), tool.rules_digest.clone());
            (tool.definition.name.to_string(), PresentTool { definition, rules, job })
        };
        let tools = self.policy.listed_tools().map(describe).collect();
        PresentTools { tools, agents, approvals: self.config.approvals.clone() }
    }
}

impl ToolOpener for RunToolOpener {
    fn check_settings(&self, settings: &ToolSettings) -> anyhow::Result<()> {
        let tools = CompiledTools::from_settings(settings)?;
        tools.config.metrics.as_ref().map(PrometheusClient::new).transpose()?;
        open_servers(&tools.config, &Arc::default(), None)?;
        tools.config.approvals.webhook.as_ref().map(Webhook::new).transpose()?;
        let host = ConnectionHost::for_check();
        ConnectionPolicy::compile_policy(&tools.config, tools.policy.agent(), &host)?;
        connection_environment(&tools.config, None)?;
        Ok(())
    }

    fn open_tools(
        &self,
        settings: &ToolSettings,
        run: &Arc<AgentRun>,
        process: ToolProcess<'_>,
    ) -> anyhow::Result<ToolEndpoints> {
        let CompiledTools { config, policy } = CompiledTools::from_settings(settings)?;
        if let (None, Some(job)) = (&self.jobs, policy.first_job()) {
            anyhow::bail!(
                "`tools.granted`: the tool `{job}` needs a sandbox, and this run's gateway makes none; remove it, or use `cogni-gateway run` or `serve` with a sandbox for each run"
            );
        }
        let facts = describe_run(&run.identity, settings);
        self.let_budget_ask((&config, &policy), (run, &facts), process)?;
        let approvals = match (&self.approvals, policy.first_asking_rule()) {
            (None, Some(COMMANDS_RULE)) => anyhow::bail!(
                "`modes.commands` of the agent is `ask`, and no person can answer here; set `off` or `auto`, or use `cogni-gateway serve`, where `cogni-gateway approvals` answers"
            ),
            (None, Some(rule)) => anyhow::bail!(
                "`tools.rules`: the rule `{rule}` has `approve = \"ask\"`, and no person can answer here; take `approve` out, or use `cogni-gateway serve`, where `cogni-gateway approvals` answers"
            ),
            (None, None) if config.approvals.on_denial == OnDenial::Propose => anyhow::bail!(
                "`tools.approvals.on_denial`: no person can answer here; take `on_denial` out, or use `cogni-gateway serve`, where `cogni-gateway approvals` answers"
            ),
            (None, None) => None,
            // People may set a policy for the agent at any time.
            (Some(store), _) => Some(RunApprovals::new(store.clone(), config.approvals.clone())),
        };
        let policy =
            policy.with_workspace(self.jobs.as_ref().and_then(|jobs| jobs.workspace_access()));
        let metrics = config.metrics.as_ref().map(PrometheusClient::new).transpose()?;
        let (jobs, tasks) = (self.jobs.clone(), process.tasks.clone());
        let salt = random_salt()?;
        let secrets = Arc::new(RunCredentials::for_config(&config));
        let host = jobs.clone().map(|jobs| McpCommandHost { jobs, tasks: tasks.clone() });
        let servers = open_servers(&config, &secrets, host.as_ref())?;
        let layer = policy.agent();
        let own = self.compile_connections((&config, layer), &run.identity.run, process)?;
        let connections = RunConnections::new(ConnectionParts {
            secrets,
            tunnels: RunTunnels::for_run(&own, &run.identity.run, process.tunnels)?,
            policy: own,
            taint: Arc::clone(policy.taint()),
            ledger: Arc::clone(&run.ledger),
            audit: Arc::clone(&run.audit),
            switches: Box::new(AgentRunSwitches(Arc::clone(run))),
            metrics: Arc::clone(process.metrics),
            tasks: process.tasks.clone(),
            salt: salt.clone(),
        });
        let tools = RunTools::new(RunToolParts {
            run: facts,
            policy,
            programs: ToolPrograms { jobs, tasks, metrics, servers },
            ledger: Arc::clone(&run.ledger),
            audit: Arc::clone(&run.audit),
            switches: Box::new(AgentRunSwitches(Arc::clone(run))),
            metrics: Arc::clone(process.metrics),
            tasks: process.tasks.clone(),
            salt,
            approvals,
            budget_asker: run.budget_asker().cloned().map(|asker| (asker, config.approvals.hold)),
        });
        Ok(ToolEndpoints { tools: Arc::new(tools), connections: Arc::new(connections) })
    }
}

impl RunToolOpener {
    fn compile_connections(
        &self,
        (config, agent): (&ToolConfig, Option<&AgentToolLayer>),
        run: &str,
        process: ToolProcess<'_>,
    ) -> anyhow::Result<ConnectionPolicy> {
        let lookups = RunLookups {
            process: Arc::clone(process.lookups),
            run: run.into(),
            lookup: self.lookup.clone().unwrap_or_else(system_lookup),
        };
        let host = ConnectionHost { lookups, programs: Arc::clone(process.programs) };
        Ok(ConnectionPolicy::compile_policy(config, agent, &host)?)
    }

    /// Lets a spent budget of the run ask a person, if the configuration says so.
    fn let_budget_ask(
        &self,
        (config, policy): (&ToolConfig, &ToolPolicy),
        (run, facts): (&AgentRun, &ToolRunFacts),
        process: ToolProcess<'_>,
    ) -> anyhow::Result<()> {
        if self.approvals.is_none() && config.approvals.webhook.is_some() {
            anyhow::bail!(
                "`tools.approvals.webhook`: no question is asked here; take the table out, or use `cogni-gateway serve`"
            );
        }
        match (&self.approvals, config.approvals.on_budget) {
            (_, OnBudget::Refuse) => {}
            (None, OnBudget::Ask) => anyhow::bail!(
                "`tools.approvals.on_budget`: no person can answer here; take `on_budget` out, or use `cogni-gateway serve`, where `cogni-gateway approvals` answers"
            ),
            (Some(store), OnBudget::Ask) => {
                run.set_budget_asker(Arc::new(BudgetQuestions::new(BudgetQuestionParts {
                    run: facts.clone(),
                    policy: policy.digest().to_owned(),
                    store: store.clone(),
                    ttl: config.approvals.ttl,
                    ledger: Arc::clone(&run.ledger),
                    audit: Arc::clone(&run.audit),
                    metrics: Arc::clone(process.metrics),
                    tasks: process.tasks.clone(),
                })));
            }
        }
        Ok(())
    }
}

/// Returns the clients of all servers of a configuration. No server is asked.
fn open_servers(
    config: &ToolConfig,
    secrets: &Arc<RunCredentials>,
    host: Option<&McpCommandHost>,
) -> anyhow::Result<BTreeMap<String, Arc<McpServer>>> {
    let open = |(name, config): (&String, &McpServerConfig)| {
        Ok((name.clone(), Arc::new(McpServer::new(name, config, secrets, host)?)))
    };
    config.mcp.iter().map(open).collect()
}

/// Returns the variables through which the programs of a run use its connections.
///
/// # Errors
/// Returns an error that names the key and the remedy.
pub fn connection_variables(settings: &ToolSettings) -> anyhow::Result<BTreeMap<String, String>> {
    let Some(table) = &settings.table else { return Ok(BTreeMap::new()) };
    let config = ToolConfig::from_table(table)?;
    Ok(connection_environment(&config, agent_layer(settings, &config)?.as_ref())?)
}

/// Returns true if a connection that a run may use has a tunnel.
///
/// # Errors
/// Returns an error that names the key and the remedy.
pub fn has_tunnels(settings: &ToolSettings) -> anyhow::Result<bool> {
    let Some(table) = &settings.table else { return Ok(false) };
    let config = ToolConfig::from_table(table)?;
    let agent = agent_layer(settings, &config)?;
    Ok(listed_connections(&config, agent.as_ref()).any(|(_, own)| own.tunnel))
}

/// Returns the layer of a run's agent; `None` for a run without an agent of the catalog.
fn agent_layer(
    settings: &ToolSettings,
    config: &ToolConfig,
) -> Result<Option<AgentToolLayer>, ToolConfigError> {
    let groups = ToolGroups::from_config(config)?;
    let Some(agent) = &settings.agent else { return Ok(None) };
    let modes = AgentModes::from_table(&agent.modes)?;
    AgentToolLayer::resolve_layer(&agent.tools, modes, groups).map(Some)
}

fn random_salt() -> anyhow::Result<String> {
    let mut salt = [0; 16];
    let filled = SystemRandom::new().fill(&mut salt);
    filled.map_err(|_| anyhow::anyhow!("the system has no random bytes for the tools' digests"))?;
    Ok(hex::encode(salt))
}

/// Returns the facts about a run that rules and questions may use.
pub fn describe_run(identity: &RunIdentity, settings: &ToolSettings) -> ToolRunFacts {
    let agent = identity.metadata.get("graph_id").and_then(serde_json::Value::as_str);
    ToolRunFacts {
        id: identity.run.clone(),
        attempt: identity.attempt.clone(),
        account: identity.account.clone(),
        agent: agent.unwrap_or_default().to_owned(),
        agent_id: settings.agent.as_ref().map(|agent| agent.id.clone()).unwrap_or_default(),
        metadata: identity.metadata.clone(),
    }
}

/// The switches of a run, as its gateway has them.
struct AgentRunSwitches(Arc<AgentRun>);

impl RunSwitches for AgentRunSwitches {
    fn check_accepting(&self) -> Result<(), ToolRefusal> {
        self.0.control.check_accepting().map_err(|error| match error {
            NotAcceptingError::Paused => ToolRefusal::Paused,
            NotAcceptingError::Ended => ToolRefusal::Ended,
        })
    }

    fn abort_token(&self) -> CancellationToken {
        self.0.control.abort_token()
    }
}
