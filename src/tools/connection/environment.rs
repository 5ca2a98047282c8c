//! The variables through which programs in a sandbox use connections without a change: addresses for `pip`, `npm` and
//! other clients with a base URL, and the settings with which git replaces the beginning of an address.

use std::collections::BTreeMap;

use crate::tools::config::{ToolConfig, ToolConfigError};
use crate::tools::connection_config::{AGENT_PREFIX, ConnectionConfig};

/// Returns the variables for a sandbox whose agent may use these tools; `None` stands for a run without an agent of
/// the catalog.
///
/// # Errors
/// Returns an error if a variable has a wrong name, or two connections set one variable.
pub fn connection_environment(
    config: &ToolConfig,
    agent: Option<&[String]>,
) -> Result<BTreeMap<String, String>, ToolConfigError> {
    let (mut variables, mut replaced) = (BTreeMap::new(), vec![]);
    for (name, connection) in &config.connections {
        check_variables(name, connection)?;
        let listed = format!("{AGENT_PREFIX}{name}");
        if agent.is_some_and(|agent| !agent.contains(&listed)) {
            continue;
        }
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
    if !replaced.is_empty() {
        variables.insert("GIT_CONFIG_COUNT".to_owned(), replaced.len().to_string());
    }
    for (number, (key, address)) in replaced.into_iter().enumerate() {
        variables.insert(format!("GIT_CONFIG_KEY_{number}"), key);
        variables.insert(format!("GIT_CONFIG_VALUE_{number}"), address.clone());
    }
    Ok(variables)
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
