//! The connections of a run: the checked settings, and the decision about a request.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use http::uri::Authority;
use http::{HeaderMap, HeaderName, Uri, request};

use super::aws_signing::{AwsSigning, TARGET};
use super::client::ConnectionClient;
use super::credential::ConnectionCredential;
use super::link_rewriter::RewrittenLink;
use super::path_rule::{ConnectRule, is_served_method};
use super::query::find_credential_parameter;
use super::refusal::{ConnectDenial, ConnectRefusal};
use super::request_path::RequestPath;
use super::reserved_headers::{is_aws_header, is_reserved_header};
use super::tunnel_address::TunnelAddress;
use super::{check_headers, split_path};
use crate::base::host_lookups::RunLookups;
use crate::base::host_reach::HostReach;
use crate::base::keyed_permits::KeyedPermits;
use crate::llm::budget::{ConnectionLimits, Nanodollars};
use crate::tools::agent_modes::AgentToolLayer;
use crate::tools::config::{LIST_RULE, ToolConfig, ToolConfigError};
use crate::tools::connection_config::{AGENT_PREFIX, ConnectionBudgetConfig, ConnectionConfig};
use crate::tools::definition::is_tool_name;
use crate::tools::http_connector::has_valid_port;

/// The connections of a run, as all layers of the configuration grant them.
#[derive(Debug, Default)]
pub struct ConnectionPolicy {
    connections: BTreeMap<Arc<str>, Connection>,
    /// The layer of the run's agent; `None` for a run without an agent of the catalog.
    agent: Option<AgentToolLayer>,
}

/// The parts of this machine and process that the connections of a run use.
#[derive(Clone)]
pub struct ConnectionHost {
    pub lookups: RunLookups,
    /// Permits for the programs that print credentials.
    pub programs: Arc<KeyedPermits>,
}

/// A connection with checked settings.
#[derive(Debug)]
pub struct Connection {
    pub name: Arc<str>,
    pub price: Nanodollars,
    pub limits: ConnectionLimits,
    pub(super) authority: Authority,
    /// The path that begins every path that is sent, without a slash at its end.
    pub(super) base_path: String,
    pub(super) credential: Option<ConnectionCredential>,
    pub(super) headers: Vec<HeaderName>,
    pub(super) client: ConnectionClient,
    pub(super) timeout: Duration,
    pub(super) rewrites_links: bool,
    /// The address of the server for tunnels; `None` for a connection without them.
    pub(super) tunnel: Option<TunnelAddress>,
    allow: Vec<ConnectRule>,
    deny: Vec<ConnectRule>,
}

impl ConnectionHost {
    /// Creates the parts for a check of settings, which runs no program.
    pub fn for_check() -> Self {
        Self { lookups: RunLookups::for_check(), programs: Arc::new(KeyedPermits::new(0, 0)) }
    }
}

impl ConnectionPolicy {
    /// Checks the connections of a configuration. `agent` is the layer of the run's agent, if the run has one: its list
    /// names a connection with [`AGENT_PREFIX`].
    ///
    /// # Errors
    /// Returns the first mistake.
    pub fn compile_policy(
        config: &ToolConfig,
        agent: Option<&AgentToolLayer>,
        host: &ConnectionHost,
    ) -> Result<Self, ToolConfigError> {
        let mut connections = BTreeMap::new();
        for (name, config) in &config.connections {
            let connection = Connection::new(name, config, host).map_err(|(key, problem)| {
                let dot = if key.is_empty() { "" } else { "." };
                ToolConfigError::new(format!("connections.{name}{dot}{key}"), problem)
            })?;
            connections.insert(Arc::clone(&connection.name), connection);
        }
        if connections.len() > MAX_CONNECTIONS {
            let problem = format!("has more than {MAX_CONNECTIONS} connections");
            return Err(ToolConfigError::new("connections", problem));
        }
        if !connections.is_empty() && config.mcp.contains_key(AGENT_WORD) {
            let problem = "is a name that connections use; give the server another name";
            return Err(ToolConfigError::new(format!("mcp.{AGENT_WORD}"), problem));
        }
        // Without connections, the same names may be those of tools.
        let agent = agent.filter(|_| !connections.is_empty()).cloned();
        let policy = Self { connections, agent };
        policy.check_agent()?;
        policy.check_tunnels()?;
        Ok(policy)
    }

    fn check_agent(&self) -> Result<(), ToolConfigError> {
        let names = self.agent.iter().flat_map(AgentToolLayer::listed_names);
        let mut listed = names.filter_map(|name| name.strip_prefix(AGENT_PREFIX));
        match listed.find(|name| !self.connections.contains_key(*name)) {
            None => Ok(()),
            Some(name) => Err(ToolConfigError::new(
                "connections",
                format!(
                    "the agent's file lists `{AGENT_PREFIX}{name}`, and there is no connection `{name}` here; add it, or remove it from `tools` in the agent's file"
                ),
            )),
        }
    }

    /// Checks that each address belongs to one tunnel: nothing but the address tells which connection a client means.
    fn check_tunnels(&self) -> Result<(), ToolConfigError> {
        let mut names = BTreeMap::new();
        for own in self.connections.values() {
            let Some(address) = &own.tunnel else { continue };
            if let Some(other) = names.insert(address, &own.name) {
                let problem = format!(
                    "has the address of the tunnel of `{other}`; take `tunnel` out of one of them"
                );
                return Err(ToolConfigError::new(
                    format!("connections.{}.tunnel", own.name),
                    problem,
                ));
            }
        }
        Ok(())
    }

    /// Returns the connection of a name, if every layer names it.
    ///
    /// # Errors
    /// Returns the layer that does not name it.
    pub fn find_connection(&self, name: &str) -> Result<&Connection, ConnectDenial> {
        let denial = |layer, rule| ConnectDenial { layer, rule: Arc::from(rule) };
        let listed = format!("{AGENT_PREFIX}{name}");
        if let Some(rule) = self.agent.as_ref().and_then(|agent| agent.denying_rule(&listed)) {
            return Err(denial("agent", rule));
        }
        self.connections.get(name).ok_or_else(|| denial("run", LIST_RULE))
    }

    /// Returns true if the configuration has a connection of this name.
    pub(super) fn has_connection(&self, name: &str) -> bool {
        self.connections.contains_key(name)
    }

    /// Returns the connections that every layer names, in the order of their names.
    pub fn listed_connections(&self) -> impl Iterator<Item = &Connection> {
        self.connections.values().filter(|own| self.find_connection(&own.name).is_ok())
    }

    /// Returns the connections whose tunnels the run may use.
    pub fn tunnelled_connections(&self) -> impl Iterator<Item = &Connection> {
        self.listed_connections().filter(|own| own.tunnel.is_some())
    }

    /// Decides about the address in a `CONNECT` request. The function has no side effect.
    ///
    /// # Errors
    /// Returns the first reason against the tunnel.
    pub(super) fn check_tunnel(&self, target: &Uri) -> Result<&Connection, ConnectRefusal> {
        let address = TunnelAddress::from_target(target).map_err(ConnectRefusal::InvalidTunnel)?;
        let own = self.connections.values().find(|own| own.tunnel.as_ref() == Some(&address));
        let denial = |layer| ConnectDenial { layer, rule: Arc::from(LIST_RULE) };
        let own = own.ok_or_else(|| ConnectRefusal::NoTunnel(denial("run")))?;
        self.find_connection(&own.name).map_err(ConnectRefusal::NoTunnel)
    }

    /// Checks the parts of a head that are not about a connection's rules, and returns the name of the connection that it
    /// is for and the path at its server; `None` for a request that goes to no server. `tunnel` is the name of the
    /// connection whose tunnel it came through.
    ///
    /// # Errors
    /// Returns the first reason against the request.
    pub(super) fn find_target<'a>(
        &self,
        head: &'a request::Parts,
        tunnel: Option<&'a str>,
    ) -> Result<Option<(&'a str, &'a str)>, ConnectRefusal> {
        let Some(name) = tunnel else {
            check_headers(&head.headers, None)?;
            return Ok(split_path(head.uri.path()));
        };
        let connection = self.find_connection(name).map_err(ConnectRefusal::NoTunnel)?;
        let address = connection.tunnel.as_ref();
        let address = address.ok_or(ConnectRefusal::NotServed)?;
        check_headers(&head.headers, Some(&address.origin()))?;
        address.check_head(head).map_err(ConnectRefusal::TunnelMismatch)?;
        let path = head.uri.path().strip_prefix(&*connection.base_path);
        let path = path.filter(|path| path.starts_with('/')).ok_or_else(|| {
            let (layer, rule) = ("connection", Arc::from(URL_RULE));
            ConnectRefusal::Denied(ConnectDenial { layer, rule })
        })?;
        Ok(Some((name, path)))
    }

    /// Returns the name of the connection that a request is for, whether there is such a connection or not; empty for a
    /// request that goes to no server.
    pub fn named_connection<'a>(path: &'a str, tunnel: Option<&'a str>) -> &'a str {
        tunnel.or_else(|| split_path(path).map(|(name, _)| name)).unwrap_or_default()
    }

    /// Returns a path at the server of a connection without the beginning that the connection's address has.
    pub(super) fn path_below_url<'a>(&self, name: &str, path: &'a str) -> &'a str {
        let base = self.connections.get(name).map_or("", |own| &*own.base_path);
        path.strip_prefix(base).unwrap_or(path)
    }

    /// Returns the links to the run's connections, for an answer over `answering`. That connection comes first: of several
    /// connections to its server, it is the one whose rules and credential the client uses. `sandbox` is the gateway's
    /// address in the sandbox.
    pub(super) fn rewritten_links(
        &self,
        answering: &Connection,
        sandbox: &str,
    ) -> Vec<RewrittenLink> {
        let link = |own: &Connection| RewrittenLink {
            server: format!("https://{}{}/", own.authority, own.base_path),
            sandbox: format!("{sandbox}/connect/{}/", own.name),
        };
        let others = self.listed_connections().filter(|own| own.name != answering.name);
        std::iter::once(answering).chain(others).map(link).collect()
    }

    /// Asks the layers and the rules about a request. The function has no side effect.
    ///
    /// # Errors
    /// Returns the first reason against the request.
    pub(super) fn check_request<'a>(
        &'a self,
        name: &str,
        method: &str,
        (path, query): (&str, Option<&str>),
    ) -> Result<(&'a Connection, Arc<str>), ConnectRefusal> {
        let connection = self.find_connection(name).map_err(ConnectRefusal::NotGranted)?;
        let path = RequestPath::parse(path).map_err(ConnectRefusal::AmbiguousPath)?;
        if !is_served_method(method) {
            let (layer, rule) = ("connection", Arc::from("method"));
            return Err(ConnectRefusal::Denied(ConnectDenial { layer, rule }));
        }
        let rule = connection.check_rules(method, path).map_err(ConnectRefusal::Denied)?;
        if let Some(parameter) = query.and_then(find_credential_parameter) {
            return Err(ConnectRefusal::ClientCredential(parameter));
        }
        Ok((connection, rule))
    }
}

impl Connection {
    /// Checks the settings. An error is the key in the connection's table, and the mistake.
    fn new(
        name: &str,
        config: &ConnectionConfig,
        host: &ConnectionHost,
    ) -> Result<Self, (String, String)> {
        let wrong = |key: &str, problem: String| (key.to_owned(), problem);
        if !is_tool_name(name) || name.contains("__") || name.len() > MAX_NAME_BYTES {
            let problem = "is not the name of a connection; give at most 48 small letters, digits, `-` and single `_`";
            return Err(wrong("", problem.to_owned()));
        }
        let reach =
            if config.allow_private_addresses { HostReach::Named } else { HostReach::Public };
        let (authority, base_path) =
            parse_url(&config.url, reach).map_err(|problem| wrong("url", problem))?;
        let credential = config.credential.as_ref();
        let credential =
            credential.map(|own| ConnectionCredential::new(own, &host.programs)).transpose();
        let credential = credential.map_err(|(key, problem)| {
            let dot = if key.is_empty() { "" } else { "." };
            (format!("credential{dot}{key}"), problem)
        })?;
        let mut headers = parse_headers(&config.headers, credential.as_ref())?;
        let signing = credential.as_ref().and_then(ConnectionCredential::signing);
        headers.extend(signing.filter(|own| own.has_targets()).map(|_| TARGET));
        let client = ConnectionClient::new(reach, config.ca_file.as_deref(), host.lookups.clone())
            .map_err(|problem| wrong("ca_file", problem))?;
        if config.timeout.is_zero() {
            return Err(wrong("timeout", "is 0; give a time such as `1m`".to_owned()));
        }
        let tunnel = config.tunnel.then(|| TunnelAddress::from_authority(&authority)).transpose();
        let tunnel = tunnel.map_err(|problem| wrong("tunnel", problem.to_owned()))?;
        let price = config.price_usd.unwrap_or_default();
        Ok(Self {
            name: name.into(),
            price,
            limits: check_budget(&config.budget, price)?,
            authority,
            base_path,
            credential,
            headers,
            client,
            timeout: config.timeout,
            rewrites_links: config.rewrite_links,
            tunnel,
            allow: parse_rules("allow", &config.allow)?,
            deny: parse_rules("deny", &config.deny)?,
        })
    }

    /// Checks what a signature needs of a request; a connection that does not sign takes every request. `headers` are the
    /// client's and those that are sent, and `length` is the announced length of the body. The function has no side effect.
    ///
    /// # Errors
    /// Returns the first reason against the request.
    pub(super) fn check_signing(
        &self,
        headers: (&HeaderMap, &HeaderMap),
        asked: (&str, Option<&str>),
        length: Option<u64>,
    ) -> Result<(), ConnectRefusal> {
        self.signing().map_or(Ok(()), |signing| signing.check_request(headers, asked, length))
    }

    pub(super) fn signing(&self) -> Option<&AwsSigning> {
        self.credential.as_ref()?.signing()
    }

    /// Asks the rules about a request: a rule that denies wins, and without a rule that allows the request is denied.
    fn check_rules(&self, method: &str, path: RequestPath<'_>) -> Result<Arc<str>, ConnectDenial> {
        let denial = |rule: Arc<str>| ConnectDenial { layer: "connection", rule };
        if let Some(rule) = self.deny.iter().find(|rule| rule.denies(method, path)) {
            return Err(denial(Arc::clone(&rule.id)));
        }
        let allowing = self.allow.iter().find(|rule| rule.allows(method, path));
        allowing.map(|rule| Arc::clone(&rule.id)).ok_or_else(|| denial(Arc::from(NO_RULE)))
    }

    /// Returns the address of a request at the connection's server.
    pub(super) fn server_uri(&self, path: &str, query: Option<&str>) -> Option<Uri> {
        let mark = if query.is_some() { "?" } else { "" };
        let target = format!("{}{path}{mark}{}", self.base_path, query.unwrap_or_default());
        let uri = Uri::builder().scheme("https").authority(self.authority.clone());
        uri.path_and_query(target).build().ok()
    }
}

/// Parses the address of a server into its authority and its path.
fn parse_url(url: &str, reach: HostReach) -> Result<(Authority, String), String> {
    let form = "give one such as `https://api.example.com`";
    let uri: Uri = url.parse().map_err(|_| format!("is not a URL; {form}"))?;
    if uri.scheme_str() == Some("http") {
        return Err("is `http`, and a connection never leaves this machine without TLS; give an `https` URL".to_owned());
    }
    let Some(authority) = uri.authority().filter(|_| uri.scheme_str() == Some("https")) else {
        return Err(format!("is not an `https` URL; {form}"));
    };
    if authority.as_str().contains('@') || uri.query().is_some() || url.contains('#') {
        return Err(format!("has a user, a query or a fragment; {form}"));
    }
    let host = authority.host().trim_start_matches('[').trim_end_matches(']');
    if !has_valid_port(authority) {
        return Err(format!("has no valid port; {form}"));
    }
    if !reach.allows_host(host) {
        return Err(format!(
            "names `{host}`, which is no host on the internet; give another host, or `allow_private_addresses = true` for a server in a private network"
        ));
    }
    let base = uri.path().trim_end_matches('/');
    if !base.is_empty() {
        RequestPath::parse(base).map_err(|problem| format!("has a path that {problem}"))?;
    }
    Ok((authority.clone(), base.to_owned()))
}

fn parse_rules(list: &str, rules: &[String]) -> Result<Vec<ConnectRule>, (String, String)> {
    if rules.len() > MAX_RULES {
        return Err((list.to_owned(), format!("has more than {MAX_RULES} rules")));
    }
    let parse = |(number, rule): (usize, &String)| {
        let id = format!("{list}[{number}]");
        ConnectRule::parse(&id, rule).map_err(|problem| (id, problem))
    };
    rules.iter().enumerate().map(parse).collect()
}

fn parse_headers(
    names: &[String],
    credential: Option<&ConnectionCredential>,
) -> Result<Vec<HeaderName>, (String, String)> {
    let signs = credential.is_some_and(|own| own.signing().is_some());
    let is_free = |name: &HeaderName| {
        (!is_reserved_header(name) || (signs && is_aws_header(name)))
            && credential.is_none_or(|own| own.header() != name)
    };
    let parse = |(number, name): (usize, &String)| match HeaderName::try_from(name) {
        Ok(name) if signs && name == TARGET => Err((
            format!("headers[{number}]"),
            "names operations; list them in `credential.aws.targets` instead".to_owned(),
        )),
        Ok(name) if is_free(&name) => Ok(name),
        _ => Err((
            format!("headers[{number}]"),
            format!("`{}` is not a header that a client may set; remove it", name.escape_debug()),
        )),
    };
    names.iter().enumerate().map(parse).collect()
}

fn check_budget(
    config: &ConnectionBudgetConfig,
    price: Nanodollars,
) -> Result<ConnectionLimits, (String, String)> {
    let wrong = |key: &str, problem: &str| Err((format!("budget.{key}"), problem.to_owned()));
    let nothing = "is 0, which allows nothing; remove the connection instead";
    if config.requests == Some(0) {
        return wrong("requests", nothing);
    }
    if config.bytes_in.is_some_and(|size| size.0 == 0) {
        return wrong("bytes_in", nothing);
    }
    let per_minute = match config.per_minute.map(NonZeroU32::new) {
        Some(None) => return wrong("per_minute", nothing),
        given => given.flatten(),
    };
    if config.cost_usd.is_some_and(|limit| limit < price) {
        return wrong("cost_usd", "does not pay for one request; raise it, or lower `price_usd`");
    }
    if config.cost_usd.is_some() && price.is_zero() {
        return wrong("cost_usd", "has no effect without a price; give `price_usd`, or remove it");
    }
    Ok(ConnectionLimits {
        requests: config.requests,
        per_minute,
        bytes_out: config.bytes_out.map(|size| size.0),
        bytes_in: config.bytes_in.map(|size| size.0),
        cost_usd: config.cost_usd,
    })
}

/// The beginning of [`AGENT_PREFIX`]. No server of MCP may have this name beside connections.
const AGENT_WORD: &str = "connect";

/// The rule of a denial because no rule allows the request.
const NO_RULE: &str = "allow";

/// The rule of a denial because the path of a request through a tunnel is not below the connection's `url`.
const URL_RULE: &str = "url";

/// The most connections and rules. Our choice: a person must be able to read them.
const MAX_CONNECTIONS: usize = 64;
const MAX_RULES: usize = 256;

/// The longest name, which fits with [`AGENT_PREFIX`] into a tool's name.
const MAX_NAME_BYTES: usize = 48;
