//! The table of a connection in a configuration, `[tools.connections.NAME]`, and its name in the file of an agent.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::credential_source::CredentialSource;
use crate::llm::budget::Nanodollars;
use crate::sandbox::spec::ByteSize;

/// A server that runs may reach through their socket, and the credential that the host adds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ConnectionConfig {
    /// The server's address, such as `https://api.github.com`. A path in it begins every path that is sent.
    pub url: String,
    /// The credential that is added to each request; without it, requests go without any credential.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub credential: Option<ConnectionCredentialConfig>,
    /// The requests that are allowed, such as `GET /repos/acme/**`. An empty list allows nothing.
    #[serde(default)]
    pub allow: Vec<String>,
    /// The requests that are denied although the other list allows them.
    #[serde(default)]
    pub deny: Vec<String>,
    /// The headers of the client that pass, beside the usual ones.
    #[serde(default)]
    pub headers: Vec<String>,
    /// The price of a request, in dollars.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price_usd: Option<Nanodollars>,
    /// The limits of the connection within a run.
    #[serde(default)]
    pub budget: ConnectionBudgetConfig,
    /// True if the server may be in a private network or on this machine.
    #[serde(default)]
    pub allow_private_addresses: bool,
    /// A PEM file of authorities to trust instead of the system's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_file: Option<PathBuf>,
    /// The longest silence of the server.
    #[serde(default = "default_timeout", with = "humantime_serde")]
    pub timeout: Duration,
    /// True if links to the run's connections are replaced in answers of HTML and JSON, and in `location`
    /// and `link`.
    #[serde(default)]
    pub rewrite_links: bool,
    /// True if programs in the sandbox may reach the server by its own address, through a tunnel (`CONNECT`).
    #[serde(default)]
    pub tunnel: bool,
    /// Variables of the sandbox. `${URL}` is the connection's address there.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// The beginnings of addresses that git in the sandbox replaces by the connection's address.
    #[serde(default)]
    pub git: Vec<String>,
}

/// The place and the form of a connection's credential.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConnectionCredentialConfig {
    /// The name of an environment variable of this process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
    /// A file, whose last line feed does not belong to the value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<PathBuf>,
    /// A program of this machine and its arguments, which prints the value.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// The name of a user: the credential is sent as the user's password (`Authorization: Basic`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub basic: Option<String>,
    /// The name of a header whose value is the credential. Without `basic` and `header`, the credential is sent as
    /// `Authorization: Bearer`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub header: Option<String>,
    /// The signatures of AWS: the value is the JSON of a `credential_process`, and signs each request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aws: Option<AwsSigningConfig>,
}

/// The signatures that a credential of AWS makes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AwsSigningConfig {
    /// The region, such as `eu-central-1`.
    pub region: String,
    /// The name of the service in signatures, such as `s3`.
    pub service: String,
    /// The operations that clients may name in `x-amz-target`, such as `DynamoDB_20120810.GetItem`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub targets: Vec<String>,
}

/// The limits of a connection within a run. A limit that is not given does not exist.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ConnectionBudgetConfig {
    /// The maximum number of requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// The maximum number of requests per minute (600).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_minute: Option<u32>,
    /// The maximum size of all request bodies, such as `5m`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_out: Option<ByteSize>,
    /// The maximum size of all response bodies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes_in: Option<ByteSize>,
    /// The maximum cost of all requests, in dollars.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cost_usd: Option<Nanodollars>,
}

impl ConnectionCredentialConfig {
    /// Returns the variable or file of the credential; empty for a program.
    pub fn source(&self) -> CredentialSource {
        CredentialSource { env: self.env.clone(), file: self.file.clone() }
    }
}

fn default_timeout() -> Duration {
    Duration::from_mins(1)
}

/// The beginning of a connection's name in the list of tools of an agent's file.
pub const AGENT_PREFIX: &str = "connect__";
