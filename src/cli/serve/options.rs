//! The options of a service, from files, variables and flags. Later sources override earlier ones.

use std::path::PathBuf;

use anyhow::bail;
use clap::{ArgMatches, Args, Command, FromArgMatches};

use crate::cli::flags;
use crate::cli::relay::RelayArgs;
use crate::cli::run::resolve_init_binary;
use crate::gateway::config::GatewayConfig;
use crate::runner::agents::AgentCatalog;
use crate::runner::tool_opener::CompiledTools;
use crate::runner::{DriverChoice, HostEnvironment};
use crate::sandbox::{InitBinary, UserRange};
use crate::service::config::{ListenAddress, ServiceConfig};
use crate::service::runs::{RunServiceConfig, open_webhook};
use crate::telemetry::audit;
use crate::tools::approval::{OnBudget, OnDenial};

/// The options of a service, read and checked.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// The defaults of runs.
    pub config: GatewayConfig,
    pub serve: ServiceConfig,
    pub catalog: AgentCatalog,
    pub relay: RelayArgs,
    /// The sandbox's first process.
    pub init: InitBinary,
}

/// The service's own flags. They override the file.
#[derive(Clone, Debug, Args)]
struct ServeArgs {
    /// An address and a port, or `unix:/path` [default: 127.0.0.1:7070]
    #[arg(long, value_name = "PLACE", env = "COGNI_LISTEN")]
    listen: Option<ListenAddress>,

    /// Serve every client without a grant; only on a loopback address or a unix socket
    #[arg(long)]
    insecure_no_auth: bool,

    /// Directory for the directories of runs [default: /run/cogni, or a user's own runtime directory]
    #[arg(long, value_name = "DIR", env = "COGNI_RUN_DIR")]
    run_dir: Option<PathBuf>,

    /// Catalog: a directory with a file for each agent [default: the built-in agents]
    #[arg(long, value_name = "DIR", env = "COGNI_AGENTS_DIR")]
    agents_dir: Option<PathBuf>,

    /// Driver for agents that do not name one: docker, embedded or auto [default: auto]
    #[arg(long, value_name = "DRIVER", env = "COGNI_DRIVER")]
    driver: Option<DriverChoice>,

    /// Docker Engine's socket, or Podman's [default: /var/run/docker.sock]
    #[arg(long, value_name = "PATH", env = "COGNI_DOCKER_SOCKET")]
    docker_socket: Option<PathBuf>,

    /// Let the embedded driver run without limits on memory, processes and processors if it may not set them
    #[arg(long)]
    allow_unlimited: bool,

    /// The sandbox's first process, or `none` [default: the cogni-init that this program carries]
    #[arg(long, value_name = "PATH", env = "COGNI_INIT")]
    init: Option<PathBuf>,

    /// Users of this machine for the sandboxes, one for each; a single number is one user for all [default:
    /// 2100000000-2100065535]
    #[arg(long, value_name = "FIRST-LAST", env = "COGNI_UIDS")]
    uids: Option<UserRange>,

    #[command(flatten)]
    relay: RelayArgs,
}

/// Adds these flags to a command.
pub(super) fn add_flags(command: Command) -> Command {
    ServeArgs::augment_args(command)
}

impl ServeOptions {
    /// Reads and checks the options.
    ///
    /// # Errors
    /// Returns an error if a file cannot be read, or if options contradict each other.
    pub fn load(
        matches: &ArgMatches,
        variable: impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Self> {
        let flags = ServeArgs::from_arg_matches(matches)?;
        let mut config = flags::read_config(super::service_settings(), matches, &variable)?;
        if config.shared.is_some() {
            bail!("`[shared]` is for `cogni-gateway shared`; take it out, or use that command");
        }
        let (given, relay) = (flags.init.clone(), flags.relay.clone());
        let serve = flags.merged_with_file(ServiceConfig::from_gateway_config(&config)?);
        let init = resolve_init_binary(given, serve.state_directory())?;
        // The checks of the configuration depend on the service's size.
        config.service_size = Some(serve.size());
        config.validate()?;
        serve.validate()?;
        check_answerable(&config, &serve)?;
        let catalog = match &serve.agents_dir {
            Some(directory) => AgentCatalog::load_directory(directory)?,
            None => AgentCatalog::builtin(),
        };
        let relay = relay.with_state_dir(serve.state_directory());
        config.decisive_files.extend(serve.agents_dir.clone());
        // No run may mount these files.
        config.files.extend(relay.private_paths(variable));
        Ok(Self { config, serve, catalog, relay, init })
    }

    /// Returns the settings of the run service. If no key for signing audit logs is configured, one is created in the
    /// state directory.
    ///
    /// # Errors
    /// Returns an error if there is no key and none can be created.
    pub fn run_service_config(&self) -> anyhow::Result<RunServiceConfig> {
        let signing_key = match &self.config.audit.signing_key {
            Some(configured) => configured.clone(),
            None => audit::load_or_create_seed(
                &self.serve.state_directory().join(audit::KEY_FILE_NAME),
            )?,
        };
        let ServiceConfig { docker_socket, run_dir, uids, .. } = self.serve.clone();
        Ok(RunServiceConfig {
            state_dir: self.serve.state_directory(),
            host: HostEnvironment { docker_socket, run_dir, init: self.init.clone(), uids },
            driver: self.serve.driver,
            allow_unlimited: self.serve.allow_unlimited,
            max_runs: self.serve.max_runs,
            max_queued_runs: self.serve.max_queued_runs,
            max_queued_runs_per_grant: self.serve.max_queued_runs_per_grant,
            max_queue_wait: self.serve.max_queue_wait,
            grace: self.serve.grace,
            retention: self.serve.retention,
            max_kept_bytes: self.serve.max_kept_bytes,
            hide_requests: self.serve.hide_requests,
            workspace_retention: self.serve.workspace_retention,
            audit_retention: self.serve.audit_retention,
            billing_retention: self.serve.billing_retention,
            signing_key,
        })
    }
}

/// Refuses rules that ask a person in a service where no person can answer.
fn check_answerable(config: &GatewayConfig, serve: &ServiceConfig) -> anyhow::Result<()> {
    let tools = CompiledTools::from_settings(&config.tools)?;
    if tools.config.approvals.webhook.is_some() && serve.insecure_no_auth {
        bail!(
            "`tools.approvals.webhook`: a service without grants asks no question: take the table or `insecure_no_auth` out"
        );
    }
    if tools.config.approvals.on_denial == OnDenial::Propose && serve.insecure_no_auth {
        bail!(
            "`tools.approvals.on_denial`: a service without grants has no person who can answer: take `insecure_no_auth` out, and make a grant with `cogni-gateway grant mint --access approve`"
        );
    }
    open_webhook(config)?;
    match tools.policy.first_asking_rule() {
        Some(rule) if serve.insecure_no_auth => bail!(
            "`tools.rules`: the rule `{rule}` has `approve = \"ask\"`, and a service without grants has no person who can answer: take `insecure_no_auth` out, and make a grant with `cogni-gateway grant mint --access approve`"
        ),
        None if serve.insecure_no_auth && tools.config.approvals.on_budget == OnBudget::Ask => {
            bail!(
                "`tools.approvals.on_budget`: a service without grants has no person who can answer: take `insecure_no_auth` out, and make a grant with `cogni-gateway grant mint --access approve`"
            )
        }
        _ => Ok(()),
    }
}

impl ServeArgs {
    fn merged_with_file(self, file: Option<ServiceConfig>) -> ServiceConfig {
        let file = file.unwrap_or_default();
        // The directory is fixed here, because its default depends on the user and the environment.
        let state_dir = Some(self.relay.state_dir().unwrap_or_else(|| file.state_directory()));
        ServiceConfig {
            listen: self.listen.unwrap_or(file.listen),
            // A flag can only turn a switch on.
            insecure_no_auth: self.insecure_no_auth || file.insecure_no_auth,
            state_dir,
            run_dir: self.run_dir.unwrap_or(file.run_dir),
            agents_dir: self.agents_dir.or(file.agents_dir),
            driver: self.driver.unwrap_or(file.driver),
            docker_socket: self.docker_socket.unwrap_or(file.docker_socket),
            allow_unlimited: self.allow_unlimited || file.allow_unlimited,
            uids: self.uids.unwrap_or(file.uids),
            ..file
        }
    }
}
