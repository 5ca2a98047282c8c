//! The named settings. Each setting is an environment variable and a flag; the flag of a secret names a file.

use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, anyhow};
use serde::de::value::StrDeserializer;
use serde::de::{DeserializeOwned, IntoDeserializer};

use super::GatewayConfig;
use crate::base::json::check_document;
use crate::base::regular_file::read_secret_file;
use crate::base::secret::SecretString;
use crate::base::trace_context;
use crate::gateway::run::{NAME_RULE, is_name};
use crate::llm::budget::{Nanodollars, Tokens};
use crate::llm::request::ProviderCapability;
use crate::telemetry::trace::collector;

/// One setting: its name, its purpose, and its effect on the configuration.
pub struct ConfigSetting {
    /// The environment variable. The flag is the same name in small letters with dashes.
    pub name: &'static str,
    /// The placeholder for the value in the help.
    pub value: &'static str,
    pub help: &'static str,
    /// True if the value is a secret. Arguments are visible to every process, so a secret's flag takes the path of its
    /// file.
    pub is_secret: bool,
    set: fn(&mut GatewayConfig, &str) -> Result<(), String>,
}

impl ConfigSetting {
    /// Applies a value to the configuration. An empty text changes nothing.
    ///
    /// # Errors
    /// Returns an error that names the variable, its value (unless it is secret) and the allowed values.
    pub fn apply_value(&self, config: &mut GatewayConfig, given: &str) -> anyhow::Result<()> {
        if given.is_empty() {
            return Ok(());
        }
        // The error may reach a log, so a secret's value must not be in it.
        let shown = if self.is_secret { "***" } else { given };
        (self.set)(config, given)
            .map_err(|allowed| anyhow!("`{}` is `{shown}`; {allowed}", self.name))
    }

    /// Finds the value in the flag or, without a flag, in the environment. A secret's flag names its file, and so does
    /// the variable `NAME_FILE`.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, or if the secret is given twice.
    pub fn find_value(
        &self,
        flag: Option<String>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> anyhow::Result<Option<String>> {
        if flag.is_none()
            && self.name == "LITELLM_HOST"
            && variable(self.name).as_deref() == Some("")
        {
            // The operator who set an empty address meant another address than the default.
            return Err(anyhow!(
                "`LITELLM_HOST` is empty; give the upstream's address, or unset it"
            ));
        }
        // For all other settings an empty variable counts as unset.
        let variable = |name: &str| variable(name).filter(|given| !given.is_empty());
        if !self.is_secret {
            return Ok(flag.or_else(|| variable(self.name)));
        }
        let file_name = format!("{}_FILE", self.name);
        let Some(path) = self.secret_file(flag, variable) else { return Ok(variable(self.name)) };
        if variable(self.name).is_some() {
            return Err(anyhow!("both `{}` and its file are given; give one of them", self.name));
        }
        let text = read_secret_file(Path::new(&path))
            .with_context(|| format!("`{file_name}` is `{path}`, which cannot be read"))?;
        // Editors end a file with a line break, which is no part of the secret.
        Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned()))
    }

    /// Returns the path of a secret's file, if the secret is in a file.
    pub fn secret_file(
        &self,
        flag: Option<String>,
        variable: impl Fn(&str) -> Option<String>,
    ) -> Option<String> {
        let file_name = self.is_secret.then(|| format!("{}_FILE", self.name))?;
        flag.or_else(|| variable(&file_name)).filter(|path| !path.is_empty())
    }

    /// Returns true if the setting belongs to the single run of a process. Such a setting has no meaning in a process
    /// with many runs.
    pub fn is_per_run(&self) -> bool {
        PER_RUN_SETTINGS.contains(&self.name)
    }

    /// Returns true if only the operator of a stand-alone gateway may use this setting, and not the process that starts
    /// a run.
    pub fn is_operator_only(&self) -> bool {
        matches!(self.name, "ADMIN_SOCKET_PATH" | "ALLOW_BUDGET_RESET")
    }

    /// Returns the flag's name: the variable's name in small letters.
    pub fn flag_name(&self) -> String {
        let flag = self.name.to_ascii_lowercase().replace('_', "-");
        if self.is_secret { flag + "-file" } else { flag }
    }

    /// Returns the environment variables that set the setting.
    pub fn variable_names(&self) -> String {
        let name = self.name;
        if self.is_secret { format!("{name} or {name}_FILE") } else { name.to_owned() }
    }
}

/// The list of all settings, in the order of the help.
pub const SETTINGS: &[ConfigSetting] = &[
    text_setting("SOCKET_PATH", "PATH", "The run's socket", |config, given| {
        config.listen.socket_path = given.into();
        Ok(())
    }),
    text_setting(
        "SOCKET_MODE",
        "OCTAL",
        "The socket's permissions [default: 0600]",
        |config, given| {
            config.listen.socket_mode = parse_mode(given)?;
            Ok(())
        },
    ),
    text_setting(
        "SOCKET_OWNER",
        "UID[:GID]",
        "The socket's owner, if the process may change owners",
        |config, given| {
            let (uid, gid) =
                given.split_once(':').map_or((given, None), |(uid, gid)| (uid, Some(gid)));
            let id =
                |text: &str| text.parse().map_err(|_| "give a numeric uid, or uid:gid".to_owned());
            config.listen.socket_uid = Some(id(uid)?);
            config.listen.socket_gid = gid.map(id).transpose()?;
            Ok(())
        },
    ),
    text_setting(
        "SOCKET_REQUIRE_UID",
        "UID,…",
        "Users whose processes may connect [default: any user]",
        |config, given| {
            let uids = given.split(',').map(|uid| uid.trim().parse());
            config.listen.require_uid =
                uids.collect::<Result<_, _>>().map_err(|_| "give numeric uids, such as 1001")?;
            Ok(())
        },
    ),
    text_setting("RUN_ID", "ID", "The run that is served", |config, given| {
        config.identity.run = parse_name(given)?;
        Ok(())
    }),
    text_setting("ATTEMPT", "ID", "The run's attempt [default: 0]", |config, given| {
        config.identity.attempt = parse_name(given)?;
        Ok(())
    }),
    text_setting(
        "BILLING_ACCOUNT_ID",
        "ID",
        "The account that pays; LiteLLM's end user",
        |config, given| {
            config.identity.account = parse_name(given)?;
            Ok(())
        },
    ),
    text_setting(
        "LITELLM_METADATA_JSON",
        "JSON",
        "More for LiteLLM's spend logs: graph_id, existing_trace_id, session_id, trace_user_id",
        |config, given| {
            let read = serde_json::from_str(given).ok();
            // A JSON object with a key twice would mean different things to the gateway and to LiteLLM.
            let is_plain = check_document(given.as_bytes()).is_ok();
            config.identity.metadata = read
                .filter(|_| is_plain)
                .ok_or("give one JSON object with each key once, such as {\"graph_id\":\"g1\"}")?;
            Ok(())
        },
    ),
    text_setting(
        "TRACEPARENT",
        "TRACEPARENT",
        "The span that the run belongs to [default: none, or the trace existing_trace_id]",
        |config, given| {
            config.identity.trace = Some(
                given
                    .parse()
                    .map_err(|error: trace_context::TraceparentError| error.to_string())?,
            );
            Ok(())
        },
    ),
    text_setting(
        "LITELLM_HOST",
        "HOST:PORT|URL",
        "The upstream [default: litellm:4000]",
        |config, given| {
            config.upstream.url = given.parse().map_err(
                |_| "give host:port, http://host:port, https://host[:port] or h2c://host:port",
            )?;
            Ok(())
        },
    ),
    secret_setting("LITELLM_MASTER_KEY", "File with the upstream's key", |config, given| {
        config.upstream.api_key = SecretString::new(given);
        Ok(())
    }),
    text_setting(
        "UPSTREAM_KIND",
        "KIND",
        "litellm, openai or anthropic [default: litellm]",
        |config, given| {
            config.upstream.kind = parse_enum(given).ok_or("give litellm, openai or anthropic")?;
            Ok(())
        },
    ),
    text_setting(
        "UPSTREAM_CA_FILE",
        "PATH",
        "PEM file of authorities to trust instead of the system's",
        |config, given| {
            config.upstream.ca_file = Some(given.into());
            Ok(())
        },
    ),
    text_setting(
        "MODELS",
        "NAME,…",
        "Models that the run may use [default: any]",
        |config, given| {
            config.policy.body.models = parse_list(given).collect();
            Ok(())
        },
    ),
    text_setting(
        "CAPABILITIES",
        "NAME,…",
        "Capabilities granted to providers, such as web_search [default: nothing]",
        |config, given| {
            config.policy.body.capabilities = parse_list(given)
                .map(|name| parse_enum(&name).ok_or_else(capability_names))
                .collect::<Result<_, _>>()?;
            Ok(())
        },
    ),
    text_setting(
        "UNKNOWN_FIELDS",
        "POLICY",
        "reject, drop or pass unknown fields of a body [default: drop]",
        |config, given| {
            config.policy.body.unknown_fields =
                parse_enum(given).ok_or("give reject, drop or pass")?;
            Ok(())
        },
    ),
    text_setting("MAX_TURNS", "COUNT", "Calls that make a model generate", |config, given| {
        config.budget.max_turns = Some(parse_number(given)?);
        Ok(())
    }),
    text_setting("MAX_TOTAL_TOKENS", "COUNT", "Tokens in and out together", |config, given| {
        config.budget.max_total_tokens = Some(Tokens(parse_number(given)?));
        Ok(())
    }),
    text_setting("MAX_INPUT_TOKENS", "COUNT", "Tokens that models read", |config, given| {
        config.budget.max_input_tokens = Some(Tokens(parse_number(given)?));
        Ok(())
    }),
    text_setting("MAX_OUTPUT_TOKENS", "COUNT", "Tokens that models write", |config, given| {
        config.budget.max_output_tokens = Some(Tokens(parse_number(given)?));
        Ok(())
    }),
    text_setting("MAX_COST_USD", "DOLLARS", "Money, by the price table", |config, given| {
        let dollars = Nanodollars::parse(given).ok_or("give an amount of dollars, such as 2.50")?;
        config.budget.max_cost_usd = Some(dollars);
        Ok(())
    }),
    text_setting("MAX_CONCURRENT", "COUNT", "Calls open at the same time", |config, given| {
        config.budget.max_concurrent = Some(parse_positive(given)?);
        Ok(())
    }),
    text_setting("REQUESTS_PER_MINUTE", "COUNT", "Calls a minute", |config, given| {
        config.budget.requests_per_minute = Some(parse_positive(given)?);
        Ok(())
    }),
    text_setting("TOKENS_PER_MINUTE", "COUNT", "Tokens a minute", |config, given| {
        config.budget.tokens_per_minute = Some(parse_positive(given)?);
        Ok(())
    }),
    text_setting(
        "RUN_DEADLINE_SECONDS",
        "SECONDS",
        "The longest duration of the run",
        |config, given| {
            config.budget.deadline = Some(Duration::from_secs(parse_positive(given)?.into()));
            Ok(())
        },
    ),
    text_setting(
        "PRICES_FILE",
        "PATH",
        "The price table [default: the built-in one]",
        |config, given| {
            config.prices.file = Some(given.into());
            Ok(())
        },
    ),
    text_setting(
        "UNKNOWN_PRICE",
        "POLICY",
        "reject or tokens_only: a model without a price, in a run with MAX_COST_USD [default: reject]",
        |config, given| {
            config.prices.unknown = parse_enum(given).ok_or("give reject or tokens_only")?;
            Ok(())
        },
    ),
    text_setting("AUDIT_LOG_PATH", "PATH", "The audit log [default: none]", |config, given| {
        config.audit.path = Some(given.into());
        Ok(())
    }),
    text_setting(
        "AUDIT_DURABILITY",
        "POLICY",
        "os, group or fsync: how records survive a crash [default: os]",
        |config, given| {
            config.audit.durability = parse_enum(given).ok_or("give os, group or fsync")?;
            Ok(())
        },
    ),
    secret_setting(
        "AUDIT_SIGNING_KEY",
        "File with the Ed25519 seed that signs the audit's checkpoints, hex or base64",
        |config, given| {
            config.audit.signing_key = Some(SecretString::new(given));
            Ok(())
        },
    ),
    text_setting(
        "ALLOW_BUDGET_RESET",
        "BOOL",
        "Allow budgets without an audit log [default: false]",
        |config, given| {
            config.audit.allow_budget_reset =
                given.parse().map_err(|_| "give true or false".to_owned())?;
            Ok(())
        },
    ),
    text_setting(
        "ACCESS_LOG_PATH",
        "PATH",
        "The access log; `-` is standard output, `off` is none [default: -]",
        |config, given| {
            config.access_log = given.into();
            Ok(())
        },
    ),
    text_setting(
        "METRICS_ADDR",
        "IP:PORT",
        "The address that Prometheus scrapes [default: off]",
        |config, given| {
            config.metrics.address = Some(
                given
                    .parse()
                    .map_err(|_| "give an IP address and a port, such as 127.0.0.1:9100")?,
            );
            Ok(())
        },
    ),
    text_setting(
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "URL",
        "The OpenTelemetry collector that receives spans over HTTP [default: none]",
        |config, given| {
            let address =
                given.parse().map_err(|error: collector::CollectorUrlError| error.to_string())?;
            config.telemetry.otlp_endpoint = Some(address);
            Ok(())
        },
    ),
    secret_setting(
        "OTEL_EXPORTER_OTLP_HEADERS",
        "File with the headers for the collector, name=value,…",
        |config, given| {
            config.telemetry.otlp_headers = SecretString::new(given);
            Ok(())
        },
    ),
    text_setting(
        "OTEL_SERVICE_NAME",
        "NAME",
        "The service name in spans [default: cogni-gateway]",
        |config, given| {
            config.telemetry.service_name = parse_name(given)?;
            Ok(())
        },
    ),
    text_setting(
        "OTEL_TRACES_SAMPLER_ARG",
        "SHARE",
        "The share of runs without a TRACEPARENT that is traced [default: 1.0]",
        |config, given| {
            let share = given.parse().ok().filter(|share| (0.0..=1.0).contains(share));
            config.telemetry.sample_ratio = share.ok_or("give a share from 0 to 1")?;
            Ok(())
        },
    ),
    text_setting(
        "ADMIN_SOCKET_PATH",
        "PATH",
        "The operator's socket [default: none]",
        |config, given| {
            config.admin.socket_path = Some(given.into());
            Ok(())
        },
    ),
    text_setting(
        "WORKERS",
        "COUNT",
        "Threads that serve connections [default: 1]",
        |config, given| {
            // The check of the whole configuration reports a number that is too large.
            config.workers = parse_positive(given)? as usize;
            Ok(())
        },
    ),
    text_setting(
        "DRAIN_TIMEOUT_SECONDS",
        "SECONDS",
        "Time for open calls to end after SIGTERM [default: 8]",
        |config, given| {
            config.drain_timeout = Duration::from_secs(parse_number(given)?);
            Ok(())
        },
    ),
];

/// The names of the settings for which [`ConfigSetting::is_per_run`] is true.
const PER_RUN_SETTINGS: &[&str] = &[
    "SOCKET_PATH",
    "SOCKET_MODE",
    "SOCKET_OWNER",
    "SOCKET_REQUIRE_UID",
    "RUN_ID",
    "ATTEMPT",
    "BILLING_ACCOUNT_ID",
    "LITELLM_METADATA_JSON",
    "TRACEPARENT",
    "AUDIT_LOG_PATH",
];

type SettingSetter = fn(&mut GatewayConfig, &str) -> Result<(), String>;

const fn text_setting(
    name: &'static str,
    value: &'static str,
    help: &'static str,
    set: SettingSetter,
) -> ConfigSetting {
    ConfigSetting { name, value, help, is_secret: false, set }
}

const fn secret_setting(
    name: &'static str,
    help: &'static str,
    set: SettingSetter,
) -> ConfigSetting {
    ConfigSetting { name, value: "PATH", help, is_secret: true, set }
}

pub(super) fn parse_mode(given: &str) -> Result<u32, String> {
    // Only permission bits: set-user-id and the like have no meaning for a socket.
    let mode = u32::from_str_radix(given, 8).ok().filter(|mode| *mode <= 0o777);
    mode.ok_or_else(|| "give permissions in octal, such as 0600".to_owned())
}

fn parse_list(given: &str) -> impl Iterator<Item = String> {
    given.split(',').map(|name| name.trim().to_owned()).filter(|name| !name.is_empty())
}

fn capability_names() -> String {
    let names: Vec<_> = ProviderCapability::ALL.into_iter().map(ProviderCapability::name).collect();
    format!("give some of {}", names.join(", "))
}

/// Parses one of a list of words, in the spelling of the TOML file.
fn parse_enum<T: DeserializeOwned>(given: &str) -> Option<T> {
    let given: StrDeserializer<'_, serde::de::value::Error> = given.into_deserializer();
    T::deserialize(given).ok()
}

fn parse_name(given: &str) -> Result<String, String> {
    if is_name(given) { Ok(given.to_owned()) } else { Err(NAME_RULE.to_owned()) }
}

fn parse_number(given: &str) -> Result<u64, String> {
    given.parse().map_err(|_| "give a whole number".to_owned())
}

fn parse_positive(given: &str) -> Result<u32, String> {
    u32::from_str(given)
        .ok()
        .filter(|number| *number > 0)
        .ok_or_else(|| format!("give a whole number from 1 to {}", u32::MAX))
}
