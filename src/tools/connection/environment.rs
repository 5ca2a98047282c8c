//! The variables through which programs in a sandbox use connections without a change: addresses for `pip`, `npm` and
//! other clients with a base URL, and the settings with which git replaces the beginning of an address.

use std::collections::BTreeMap;

use crate::guest::init::tunnel_trust::tunnel_variables;
use crate::tools::agent_modes::AgentToolLayer;
use crate::tools::config::{ToolConfig, ToolConfigError};
use crate::tools::connection_config::{AGENT_PREFIX, ConnectionConfig};

/// Returns the variables for a sandbox whose agent may use these tools; `None` stands for a run without an agent of
/// the catalog. A connection's own variable replaces the one that tunnels need.
///
/// # Errors
/// Returns an error if a variable has a wrong name, or two connections set one variable.
pub fn connection_environment(
    config: &ToolConfig,
    agent: Option<&AgentToolLayer>,
) -> Result<BTreeMap<String, String>, ToolConfigError> {
    let (mut variables, mut replaced) = (BTreeMap::new(), vec![]);
    for (name, connection) in &config.connections {
        check_variables(name, connection)?;
    }
    for (name, connection) in listed_connections(config, agent) {
        let url = format!("{SANDBOX_URL}/connect/{name}");
        for (variable, value) in &connection.env {
            let value = value.replace(URL_PLACEHOLDER, &url);
            if variables.insert(variable.clone(), value).is_some() {
                let problem = "is set by two connections; remove one of them";
                let key = format!("connections.{name}.env.{variable}");
                return Err(ToolConfigError::new(key, problem));
            }
        }
        let pairs = connection.git.iter().map(|address| (format!("url.{url}/.insteadOf"), address));
        replaced.extend(pairs);
    }
    if listed_connections(config, agent).any(|(_, connection)| connection.tunnel) {
        for (variable, value) in tunnel_variables(SANDBOX_URL) {
            variables.entry(variable.to_owned()).or_insert(value);
        }
    }
    if !replaced.is_empty() {
        variables.insert("GIT_CONFIG_COUNT".to_owned(), replaced.len().to_string());
    }
    for (number, (key, address)) in replaced.into_iter().enumerate() {
        variables.insert(format!("GIT_CONFIG_KEY_{number}"), key);
        variables.insert(format!("GIT_CONFIG_VALUE_{number}"), address.clone());
    }
    Ok(variables)
}

/// Returns the connections that an agent's list names and its modes leave; `None` stands for a run without an agent of the catalog.
pub fn listed_connections<'a>(
    config: &'a ToolConfig,
    agent: Option<&'a AgentToolLayer>,
) -> impl Iterator<Item = (&'a String, &'a ConnectionConfig)> {
    let is_listed = move |name: &String| {
        let listed = format!("{AGENT_PREFIX}{name}");
        agent.is_none_or(|agent| agent.denying_rule(&listed).is_none())
    };
    config.connections.iter().filter(move |(name, _)| is_listed(name))
}

fn check_variables(name: &str, connection: &ConnectionConfig) -> Result<(), ToolConfigError> {
    let is_name = |text: &str| {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'_';
        text.bytes().all(is_plain) && text.starts_with(|c: char| !c.is_ascii_digit())
    };
    let wrong = |key: String, problem: &str| {
        Err(ToolConfigError::new(format!("connections.{name}.{key}"), problem))
    };
    for (variable, value) in &connection.env {
        if !is_name(variable) || value.contains('\0') {
            return wrong(format!("env.{variable}"), "is not a variable of a sandbox");
        }
        if variable.starts_with("GIT_CONFIG_") {
            return wrong(format!("env.{variable}"), "is set by `git`; give the address there");
        }
    }
    let is_address = |address: &&String| address.ends_with('/') && address.contains("://");
    if let Some(number) = connection.git.iter().position(|address| !is_address(&address)) {
        let problem = "is not the beginning of addresses; give one such as `https://github.com/`";
        return wrong(format!("git[{number}]"), problem);
    }
    Ok(())
}

/// The gateway's address in every sandbox, where the first process listens.
pub(super) const SANDBOX_URL: &str = "http://localhost:8080";

/// The text in a variable's value that the connection's address replaces.
const URL_PLACEHOLDER: &str = "${URL}";
