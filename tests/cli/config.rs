//! Tests of settings: their sources, their precedence, and the errors of wrong values.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use cogni_gateway::cli;
use cogni_gateway::cli::explain;
use cogni_gateway::cli::proxy::load_config;
use cogni_gateway::gateway::config::{GatewayConfig, SETTINGS};
use cogni_gateway::llm::budget::price::{PriceConfig, PriceTable};
use cogni_gateway::telemetry::audit::verify::verify_file;

/// G2: Each setting can be a variable, a flag, or a line of the file, with the same meaning.
#[test]
fn every_setting_can_be_given_in_each_way() {
    for setting in SETTINGS {
        let row = EXAMPLES.iter().find(|(name, ..)| *name == setting.name);
        let (name, value, file) = *row.unwrap_or_else(|| panic!("{} has no example", setting.name));
        let plain = CommandInput::default().with("RUN_ID", "r").read().unwrap();
        let variable =
            CommandInput::default().with("RUN_ID", "r").with(name, value).read().unwrap();
        assert_ne!(plain, variable, "{name} does nothing");
        if setting.is_secret {
            let path = ConfigTempFile::holding(value);
            let by_flag = CommandInput::default().flag(&setting.flag_name(), path.path()).read();
            // A secret must be given only once.
            let twice = by_flag.is_err() && name == "LITELLM_MASTER_KEY";
            assert!(twice || by_flag.unwrap().audit == variable.audit);
            let by_file =
                CommandInput::bare().with("RUN_ID", "r").with(&format!("{name}_FILE"), path.path());
            let by_file = if name == "LITELLM_MASTER_KEY" {
                by_file
            } else {
                by_file.with("LITELLM_MASTER_KEY", "sk-x")
            };
            let by_file = by_file.read().unwrap();
            assert_eq!(by_file.files, [PathBuf::from(path.path())], "kept from sandboxes");
            assert_eq!(GatewayConfig { files: vec![], ..by_file }, variable, "{name}_FILE");
            continue;
        }
        let flag = CommandInput::default()
            .with("RUN_ID", "r")
            .flag(&setting.flag_name(), value)
            .read()
            .unwrap();
        assert_eq!(flag, variable, "--{}", setting.flag_name());
        if let Some(file) = file {
            let path = ConfigTempFile::holding(file);
            let file = CommandInput::default()
                .with("RUN_ID", "r")
                .flag("config", path.path())
                .read()
                .unwrap();
            assert_eq!(file.files, [PathBuf::from(path.path())], "kept from sandboxes");
            assert_eq!(GatewayConfig { files: vec![], ..file }, variable, "{name} in a file");
        }
    }
}

/// G2: A flag overrides its variable, and a variable overrides the file.
#[test]
fn a_flag_wins_over_a_variable_and_a_variable_over_the_file() {
    let file = ConfigTempFile::holding(
        "[budget]\nmax_turns = 1\nmax_concurrent = 1\nrequests_per_minute = 1",
    );
    let config = CommandInput::default()
        .with("CONFIG", file.path())
        .with("MAX_CONCURRENT", "2")
        .with("REQUESTS_PER_MINUTE", "2")
        .flag("requests-per-minute", "3")
        .read()
        .unwrap();
    let budget = config.budget;
    let read = (budget.max_turns, budget.max_concurrent, budget.requests_per_minute);
    assert_eq!(read, (Some(1), Some(2), Some(3)));
}

/// G9: A limit that each restart would reset is refused.
#[test]
fn a_budget_that_a_restart_would_reset_is_refused() {
    let check = |given: CommandInput| given.read().unwrap().check_budgets_durable();
    let limited = || CommandInput::default().with("MAX_TURNS", "1");
    let error = check(limited()).unwrap_err();
    insta::assert_snapshot!(error, @"there is a budget, and `AUDIT_LOG_PATH` is not set: without an audit log each restart begins the budget anew; set `AUDIT_LOG_PATH`, or say `ALLOW_BUDGET_RESET=true`");
    check(limited().with("AUDIT_LOG_PATH", "/a.jsonl")).unwrap();
    check(limited().with("ALLOW_BUDGET_RESET", "true")).unwrap();
    check(CommandInput::default().with("MAX_CONCURRENT", "1")).unwrap();
}

/// A duration that no clock can represent is refused.
#[test]
fn a_duration_beyond_every_clock_is_refused() {
    for (table, name) in [("budget", "deadline"), ("upstream", "idle_timeout")] {
        let file = ConfigTempFile::holding(&format!("[{table}]\n{name} = '584000000000years'"));
        let error = CommandInput::default().with("CONFIG", file.path()).error();
        assert!(error.starts_with(&format!("`{table}.{name}` is `")), "{error}");
        assert!(error.ends_with("give at most 36500 days"), "{error}");
    }
}

/// A time limit of zero ends every call, so it is refused.
#[test]
fn a_wait_of_no_time_is_refused() {
    let error = |table: &str, name: &str| {
        let file = ConfigTempFile::holding(&format!("[{table}]\n{name} = '0s'"));
        CommandInput::default().with("CONFIG", file.path()).error()
    };
    insta::assert_snapshot!(error("budget", "deadline"), @"`budget.deadline` is `0s`, so every call would fail; give a longer time, or leave it out to set none");
    insta::assert_snapshot!(error("upstream", "first_byte_timeout"), @"`upstream.first_byte_timeout` is `0s`, so every call would fail; give a longer time, or leave it out for the default");
    for (table, name) in [
        ("server", "header_timeout"),
        ("server", "write_timeout"),
        ("upstream", "connect_timeout"),
        ("upstream", "idle_timeout"),
        ("policy", "body_timeout"),
    ] {
        assert!(error(table, name).starts_with(&format!("`{table}.{name}` is `0s`")));
    }
}

/// A device or a named pipe in the place of a file never ends, so it is refused at once.
#[test]
fn a_file_that_never_ends_is_refused() {
    let error = CommandInput::default().with("CONFIG", "/dev/zero").error();
    assert_eq!(error, "cannot read `/dev/zero`: it is no regular file");
    let prices = PriceConfig { file: Some("/dev/zero".into()), ..PriceConfig::default() };
    let error = PriceTable::load_table(&prices).unwrap_err();
    assert_eq!(error.source().unwrap().to_string(), "it is no regular file");
    let error = verify_file(Path::new("/dev/zero"), None).unwrap_err();
    assert_eq!(error.source().unwrap().to_string(), "it is no regular file");
}

/// A socket whose path is too long, and a path with a zero byte, could never be made, so `check` refuses them.
#[test]
fn a_path_that_cannot_be_made_is_refused() {
    let error = |text: &str| {
        let file = ConfigTempFile::holding(text);
        CommandInput::default().with("CONFIG", file.path()).error()
    };
    let with_zero = "= \"/run/a\\u0000b\"";
    for (text, name) in [
        (format!("[listen]\nsocket_path {with_zero}"), "listen.socket_path"),
        (format!("[admin]\nsocket_path {with_zero}"), "admin.socket_path"),
        (format!("[audit]\npath {with_zero}"), "audit.path"),
        (format!("access_log {with_zero}"), "access_log"),
    ] {
        let refusal = format!("`{name}` has a zero byte, which no path has; take it out");
        assert_eq!(error(&text), refusal);
    }
    for table in ["listen", "admin"] {
        let error = error(&format!("[{table}]\nsocket_path = '/run/a/{}'", "s".repeat(101)));
        assert!(error.starts_with(&format!("`{table}.socket_path` is `/run/a/s")), "{error}");
        assert!(error.ends_with("the 107 bytes of a socket's path; give a shorter one"), "{error}");
    }
}

/// `explain` reads no named pipe and no device in the place of its file, nor a file without end on standard input.
#[test]
fn an_explained_request_has_an_end() {
    let explain = |file: &str, input: &mut dyn Read| {
        let matches = explain::command().try_get_matches_from(["explain", file]).unwrap();
        let error = explain::run(&matches, input, &mut vec![]).unwrap_err();
        format!("{error:#}")
    };
    let error = explain("/dev/zero", &mut io::empty());
    insta::assert_snapshot!(error, @"cannot read `/dev/zero`: it is no regular file");
    let error = explain("-", &mut io::repeat(b' '));
    insta::assert_snapshot!(error, @"cannot read standard input: it has more than 268435456 bytes");
}

/// G15: One body of the maximum size must fit into the run's memory limit.
#[test]
fn a_body_that_never_fits_is_refused() {
    let file = ConfigTempFile::holding("[policy]\nmax_body_bytes = 200000000");
    let error = CommandInput::default().with("CONFIG", file.path()).error();
    insta::assert_snapshot!(error, @"`policy.max_body_bytes` is `200000000` and `server.max_run_body_bytes` is `104857600`; one body must fit, so raise the second or lower the first");
}

/// G2: An empty upstream is refused, and does not mean the default upstream.
#[test]
fn an_empty_upstream_is_refused() {
    let error = CommandInput::default().with("LITELLM_HOST", "").error();
    insta::assert_snapshot!(error, @"`LITELLM_HOST` is empty; give the upstream's address, or unset it");
}

/// G2: Compose files leave variables empty, which means the same as leaving them out.
#[test]
fn an_empty_variable_is_no_value() {
    let plain = CommandInput::default().read().unwrap();
    for setting in SETTINGS {
        if CommandInput::default().variables.contains_key(setting.name)
            || setting.name == "LITELLM_HOST"
        {
            continue;
        }
        let given = CommandInput::default().with(setting.name, "");
        let given = given.with(&format!("{}_FILE", setting.name), "").with("CONFIG", "");
        assert_eq!(given.read().unwrap(), plain, "{}", setting.name);
    }
}

/// G2: The error of a wrong value names the variable, the value, and the allowed values.
#[test]
fn a_wrong_value_names_its_variable_and_what_is_allowed() {
    let said: Vec<_> = WRONG
        .iter()
        .map(|(name, value)| CommandInput::default().with(name, value).error())
        .collect();
    insta::assert_snapshot!(said.join("\n"), @r#"
    `SOCKET_MODE` is `rw-------`; give permissions in octal, such as 0600
    `SOCKET_OWNER` is `root`; give a numeric uid, or uid:gid
    `SOCKET_REQUIRE_UID` is `agent`; give numeric uids, such as 1001
    `RUN_ID` is `run 1`; use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`
    `ATTEMPT` is `first try`; use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`
    `BILLING_ACCOUNT_ID` is `acct=1`; use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`
    `LITELLM_METADATA_JSON` is `[]`; give one JSON object with each key once, such as {"graph_id":"g1"}
    `LITELLM_METADATA_JSON` is `{"a":1,"\u0061":2}`; give one JSON object with each key once, such as {"graph_id":"g1"}
    `TRACEPARENT` is `0af7651916cd43dd8448eb211c80319c`; give a W3C traceparent, such as 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01
    `LITELLM_HOST` is `http://litellm:4000/v1`; give host:port, http://host:port, https://host[:port] or h2c://host:port
    `UPSTREAM_KIND` is `azure`; give litellm, openai or anthropic
    `CAPABILITIES` is `web_search,everything`; give some of web_search, web_fetch, code_interpreter, computer_use, file_search, image_generation, remote_mcp, remote_media, file_ids, stored_state, background, containers, unknown_tools
    `UNKNOWN_FIELDS` is `keep`; give reject, drop or pass
    `MAX_TURNS` is `-1`; give a whole number
    `MAX_TOTAL_TOKENS` is `1e6`; give a whole number
    `MAX_INPUT_TOKENS` is `many`; give a whole number
    `MAX_OUTPUT_TOKENS` is `1,000`; give a whole number
    `MAX_COST_USD` is `$5`; give an amount of dollars, such as 2.50
    `MAX_CONCURRENT` is `0`; give a whole number from 1 to 4294967295
    `REQUESTS_PER_MINUTE` is `0`; give a whole number from 1 to 4294967295
    `TOKENS_PER_MINUTE` is `4294967296`; give a whole number from 1 to 4294967295
    `RUN_DEADLINE_SECONDS` is `10m`; give a whole number from 1 to 4294967295
    `UNKNOWN_PRICE` is `free`; give reject or tokens_only
    `ALLOW_BUDGET_RESET` is `maybe`; give true or false
    `AUDIT_DURABILITY` is `always`; give os, group or fsync
    `METRICS_ADDR` is `localhost:9100`; give an IP address and a port, such as 127.0.0.1:9100
    `OTEL_EXPORTER_OTLP_ENDPOINT` is `collector:4318`; give a URL, such as http://collector:4318
    `OTEL_EXPORTER_OTLP_HEADERS` is not valid; give name=value pairs with commas between them
    `OTEL_SERVICE_NAME` is `my gateway`; use 1 to 128 letters, digits, `.`, `_`, `:`, `@`, `/` or `-`
    `OTEL_TRACES_SAMPLER_ARG` is `2`; give a share from 0 to 1
    `WORKERS` is `0`; give a whole number from 1 to 4294967295
    `DRAIN_TIMEOUT_SECONDS` is `soon`; give a whole number
    "#);
}

/// G2: Every setting that can have a wrong value is in the table above.
#[test]
fn every_setting_that_can_be_wrong_is_tried() {
    let anything = [
        "SOCKET_PATH",
        "LITELLM_MASTER_KEY",
        "UPSTREAM_CA_FILE",
        "MODELS",
        "PRICES_FILE",
        "ADMIN_SOCKET_PATH",
        "AUDIT_LOG_PATH",
        "AUDIT_SIGNING_KEY",
        "ACCESS_LOG_PATH",
    ];
    for setting in SETTINGS.iter().filter(|setting| !anything.contains(&setting.name)) {
        assert!(WRONG.iter().any(|(name, _)| *name == setting.name), "{}", setting.name);
    }
}

/// G2: The error names a missing required setting.
#[test]
fn a_missing_setting_is_named() {
    let without = |name: &str| {
        let mut given = CommandInput::default();
        given.variables.remove(name);
        given.error()
    };
    insta::assert_snapshot!(without("RUN_ID"), @"`RUN_ID` is not set, and every call is recorded and billed under it; give `--run-id ID`");
    insta::assert_snapshot!(without("BILLING_ACCOUNT_ID"), @"`BILLING_ACCOUNT_ID` is not set, and LiteLLM bills it as the end user; give `--billing-account-id ID`");
    insta::assert_snapshot!(without("LITELLM_MASTER_KEY"), @"`LITELLM_MASTER_KEY` is not set; give the upstream's key there, or its file in `LITELLM_MASTER_KEY_FILE`");
}

/// G8: Only LiteLLM bills an end user, so other upstreams need no account.
#[test]
fn other_upstreams_need_no_account() {
    for kind in ["openai", "anthropic"] {
        let mut given = CommandInput::default().with("UPSTREAM_KIND", kind);
        given.variables.remove("BILLING_ACCOUNT_ID");
        assert_eq!(given.read().unwrap().identity.account, "");
    }
}

/// G2: A secret is given once, and never printed.
#[test]
fn secrets_are_given_once_and_never_shown() {
    let file = ConfigTempFile::holding("sk-secret\n");
    let by_file =
        CommandInput::bare().with("RUN_ID", "r").with("LITELLM_MASTER_KEY_FILE", file.path());
    let config = by_file.read().unwrap();
    assert_eq!(
        config.upstream.api_key.expose_secret(),
        "sk-secret",
        "the line end is not part of it"
    );
    assert!(!format!("{config:?} {config:#?} {}", config.digest()).contains("sk-secret"));
    let both = CommandInput::default().with("LITELLM_MASTER_KEY_FILE", file.path()).error();
    insta::assert_snapshot!(both, @"both `LITELLM_MASTER_KEY` and its file are given; give one of them");
    let missing = CommandInput::bare().with("LITELLM_MASTER_KEY_FILE", "/nowhere/key").error();
    insta::assert_snapshot!(missing, @"`LITELLM_MASTER_KEY_FILE` is `/nowhere/key`, which cannot be read: No such file or directory (os error 2)");
}

/// G2: A file with an unknown key or value is refused as a whole.
#[test]
fn a_file_is_accepted_as_a_whole_or_not_at_all() {
    let error = |text: &str| {
        let place = ConfigTempFile::holding(text);
        let error = CommandInput::default().with("CONFIG", place.path()).error();
        error.replace(place.path(), "[file]")
    };
    insta::assert_snapshot!(error("max_turns = 1"), @r"
    `[file]` is not a valid configuration: TOML parse error at line 1, column 1
      |
    1 | max_turns = 1
      | ^^^^^^^^^
    unknown field `max_turns`, expected one of `listen`, `shared`, `serve`, `server`, `upstream`, `budget`, `prices`, `policy`, `tools`, `audit`, `access_log`, `access_log_max_bytes`, `metrics`, `telemetry`, `admin`, `workers`, `drain_timeout`
    ");
    insta::assert_snapshot!(error("[budget]\nmax_turnz = 1"), @r"
    `[file]` is not a valid configuration: TOML parse error at line 2, column 1
      |
    2 | max_turnz = 1
      | ^^^^^^^^^
    unknown field `max_turnz`, expected one of `max_turns`, `max_total_tokens`, `max_input_tokens`, `max_output_tokens`, `max_cost_usd`, `max_concurrent`, `requests_per_minute`, `tokens_per_minute`, `free_calls_per_minute`, `deadline`
    ");
    insta::assert_snapshot!(error("[upstream]\nurl = \"ftp://x\""), @r#"
    `[file]` is not a valid configuration: TOML parse error at line 2, column 7
      |
    2 | url = "ftp://x"
      |       ^^^^^^^^^
    `ftp://x` is not an upstream: the scheme is unknown; give `host:port`, `http://host:port`, `https://host[:port]` or `h2c://host:port`
    "#);
    insta::assert_snapshot!(error("[upstream]\napi_key = \"sk-secret\""), @r#"
    `[file]` is not a valid configuration: TOML parse error at line 2, column 1
      |
    2 | api_key = "sk-secret"
      | ^^^^^^^
    unknown field `api_key`, expected one of `url`, `kind`, `ca_file`, `connect_timeout`, `first_byte_timeout`, `idle_timeout`, `pool_idle_timeout`
    "#);
    insta::assert_snapshot!(error("[listen]\nsocket_mode = \"0999\""), @r#"
    `[file]` is not a valid configuration: TOML parse error at line 2, column 15
      |
    2 | socket_mode = "0999"
      |               ^^^^^^
    give permissions in octal, such as 0600
    "#);
    insta::assert_snapshot!(error("[server]\nbuffer_bytes = 100"), @"`server.buffer_bytes` is `100`; give 8192 to 16777216");
    insta::assert_snapshot!(error("[server]\nmax_connections = 0"), @"`server.max_connections` is `0`; give 1 to 1000000");
    for limit in
        ["max_connections", "buffer_bytes", "max_headers", "max_requests", "max_run_body_bytes"]
    {
        let said = error(&format!("[server]\n{limit} = {}", i64::MAX));
        assert!(said.starts_with(&format!("`server.{limit}` is `{}`; give ", i64::MAX)), "{said}");
    }
    insta::assert_snapshot!(error("[server]\nmax_headers = 100000"), @"`server.max_headers` is `100000`; give 1 to 4096");
    let missing = CommandInput::default().with("CONFIG", "/nowhere/gateway.toml").error();
    insta::assert_snapshot!(missing, @"cannot read `/nowhere/gateway.toml`: No such file or directory (os error 2)");
}

/// A command line and an environment.
#[derive(Clone)]
struct CommandInput {
    arguments: Vec<String>,
    variables: BTreeMap<String, String>,
}

impl Default for CommandInput {
    /// The settings that every run needs.
    fn default() -> Self {
        Self::bare().with("RUN_ID", "run-1").with("LITELLM_MASTER_KEY", "sk-x")
    }
}

impl CommandInput {
    fn bare() -> Self {
        let arguments = vec!["cogni-gateway".to_owned(), "proxy".to_owned()];
        let variables = BTreeMap::from([("BILLING_ACCOUNT_ID".to_owned(), "acct-1".to_owned())]);
        Self { arguments, variables }
    }

    fn with(mut self, name: &str, value: &str) -> Self {
        self.variables.insert(name.to_owned(), value.to_owned());
        self
    }

    fn flag(mut self, name: &str, value: &str) -> Self {
        self.arguments.push(format!("--{name}={value}"));
        self
    }

    fn read(&self) -> anyhow::Result<GatewayConfig> {
        let matches = cli::command().try_get_matches_from(&self.arguments).unwrap();
        let (_, matches) = matches.subcommand().unwrap();
        load_config(matches, |name| self.variables.get(name).cloned())
    }

    fn error(&self) -> String {
        format!("{:#}", self.read().unwrap_err())
    }
}

/// A file with this text.
struct ConfigTempFile(tempfile::NamedTempFile);

impl ConfigTempFile {
    fn holding(text: &str) -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        Self(file)
    }

    fn path(&self) -> &str {
        self.0.path().to_str().unwrap()
    }
}

/// Each setting with a value that is not its default, and the same value as a line of the file. Identity and secrets
/// cannot be in the file.
const EXAMPLES: &[(&str, &str, Option<&str>)] = &[
    ("SOCKET_PATH", "/run/x.sock", Some("[listen]\nsocket_path = '/run/x.sock'")),
    ("SOCKET_MODE", "0660", Some("[listen]\nsocket_mode = '0660'")),
    ("SOCKET_OWNER", "7:8", Some("[listen]\nsocket_uid = 7\nsocket_gid = 8")),
    ("SOCKET_REQUIRE_UID", "7, 8", Some("[listen]\nrequire_uid = [7, 8]")),
    ("RUN_ID", "run-9", None),
    ("ATTEMPT", "3", None),
    ("BILLING_ACCOUNT_ID", "acct-9", None),
    ("LITELLM_METADATA_JSON", r#"{"graph_id":"g"}"#, None),
    ("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", None),
    ("LITELLM_HOST", "https://llm:8443", Some("[upstream]\nurl = 'https://llm:8443'")),
    ("LITELLM_MASTER_KEY", "sk-other", None),
    ("UPSTREAM_KIND", "openai", Some("[upstream]\nkind = 'openai'")),
    ("UPSTREAM_CA_FILE", "/ca.pem", Some("[upstream]\nca_file = '/ca.pem'")),
    ("MODELS", "a, b,,c", Some("[policy.body]\nmodels = ['a', 'b', 'c']")),
    (
        "CAPABILITIES",
        "web_search, file_ids",
        Some("[policy.body]\ncapabilities = [\"file_ids\", \"web_search\"]"),
    ),
    ("UNKNOWN_FIELDS", "reject", Some("[policy.body]\nunknown_fields = \"reject\"")),
    ("MAX_TURNS", "7", Some("[budget]\nmax_turns = 7")),
    ("MAX_TOTAL_TOKENS", "7", Some("[budget]\nmax_total_tokens = 7")),
    ("MAX_INPUT_TOKENS", "7", Some("[budget]\nmax_input_tokens = 7")),
    ("MAX_OUTPUT_TOKENS", "7", Some("[budget]\nmax_output_tokens = 7")),
    ("MAX_COST_USD", "2.50", Some("[budget]\nmax_cost_usd = 2.5")),
    ("MAX_CONCURRENT", "7", Some("[budget]\nmax_concurrent = 7")),
    ("REQUESTS_PER_MINUTE", "7", Some("[budget]\nrequests_per_minute = 7")),
    ("TOKENS_PER_MINUTE", "7", Some("[budget]\ntokens_per_minute = 7")),
    ("RUN_DEADLINE_SECONDS", "7", Some("[budget]\ndeadline = '7s'")),
    ("ALLOW_BUDGET_RESET", "true", Some("[audit]\nallow_budget_reset = true")),
    ("AUDIT_LOG_PATH", "/a.jsonl", Some("[audit]\npath = '/a.jsonl'")),
    ("PRICES_FILE", "/p.toml", Some("[prices]\nfile = '/p.toml'")),
    ("UNKNOWN_PRICE", "tokens_only", Some("[prices]\nunknown = 'tokens_only'")),
    ("AUDIT_DURABILITY", "fsync", Some("[audit]\ndurability = 'fsync'")),
    ("AUDIT_SIGNING_KEY", "00", None),
    ("ACCESS_LOG_PATH", "/a.log", Some("access_log = '/a.log'")),
    ("METRICS_ADDR", "127.0.0.1:9", Some("[metrics]\naddress = '127.0.0.1:9'")),
    (
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "http://otel:4318/",
        Some("[telemetry]\notlp_endpoint = 'http://otel:4318/v1/traces'"),
    ),
    ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x,x-team=a", None),
    ("OTEL_SERVICE_NAME", "llm", Some("[telemetry]\nservice_name = 'llm'")),
    ("OTEL_TRACES_SAMPLER_ARG", "0.5", Some("[telemetry]\nsample_ratio = 0.5")),
    ("ADMIN_SOCKET_PATH", "/run/a.sock", Some("[admin]\nsocket_path = '/run/a.sock'")),
    ("WORKERS", "7", Some("workers = 7")),
    ("DRAIN_TIMEOUT_SECONDS", "7", Some("drain_timeout = '7s'")),
];

const WRONG: &[(&str, &str)] = &[
    ("SOCKET_MODE", "rw-------"),
    ("SOCKET_OWNER", "root"),
    ("SOCKET_REQUIRE_UID", "agent"),
    ("RUN_ID", "run 1"),
    ("ATTEMPT", "first try"),
    ("BILLING_ACCOUNT_ID", "acct=1"),
    ("LITELLM_METADATA_JSON", "[]"),
    ("LITELLM_METADATA_JSON", r#"{"a":1,"\u0061":2}"#),
    ("TRACEPARENT", "0af7651916cd43dd8448eb211c80319c"),
    ("LITELLM_HOST", "http://litellm:4000/v1"),
    ("UPSTREAM_KIND", "azure"),
    ("CAPABILITIES", "web_search,everything"),
    ("UNKNOWN_FIELDS", "keep"),
    ("MAX_TURNS", "-1"),
    ("MAX_TOTAL_TOKENS", "1e6"),
    ("MAX_INPUT_TOKENS", "many"),
    ("MAX_OUTPUT_TOKENS", "1,000"),
    ("MAX_COST_USD", "$5"),
    ("MAX_CONCURRENT", "0"),
    ("REQUESTS_PER_MINUTE", "0"),
    ("TOKENS_PER_MINUTE", "4294967296"),
    ("RUN_DEADLINE_SECONDS", "10m"),
    ("UNKNOWN_PRICE", "free"),
    ("ALLOW_BUDGET_RESET", "maybe"),
    ("AUDIT_DURABILITY", "always"),
    ("METRICS_ADDR", "localhost:9100"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318"),
    ("OTEL_EXPORTER_OTLP_HEADERS", "sk-secret"),
    ("OTEL_SERVICE_NAME", "my gateway"),
    ("OTEL_TRACES_SAMPLER_ARG", "2"),
    ("WORKERS", "0"),
    ("DRAIN_TIMEOUT_SECONDS", "soon"),
];
