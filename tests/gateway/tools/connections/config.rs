//! T6, T7: Tests of the table of connections: mistakes are refused with their key and a remedy, and `explain` says who
//! decides.

use cogni_gateway::cli::explain;
use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::runner::tool_opener::connection_variables;
use cogni_gateway::tools::config::ToolConfig;
use cogni_gateway::tools::connection::policy::{ConnectionHost, ConnectionPolicy};

use crate::support::app::TestApp;
use crate::tools::{agent_listing, tool_settings};

/// T7: a table that is ambiguous, or says nothing, is refused with its key and a remedy.
#[test]
fn a_wrong_connection_names_its_key_and_a_remedy() {
    let with = |text: &str| format!("[connections.api]\nurl = 'https://api.example.com'\n{text}");
    let url = |text: &str| format!("[connections.api]\nurl = '{text}'\n");
    let tunnel = |text: &str| with("tunnel = true\n") + text + "\n";
    let tables = [
        "[connections.api]\n".to_owned(),
        with("hosts = ['x']"),
        url("http://api.example.com"),
        url("ftp://api.example.com"),
        url("api.example.com"),
        url("https://user:pass@api.example.com"),
        url("https://api.example.com?x=y"),
        url("https://api.example.com/a/../b"),
        url("https://api.example.com:99999"),
        url("https://api.example.com:0"),
        url("https://[2606:4700::1111]:00"),
        url("https://api.example.com:"),
        url("https://127.0.0.1"),
        url("https://localhost:8443"),
        url("https://169.254.169.254"),
        url("https://0x7f.1"),
        "[connections.'A B']\nurl = 'https://api.example.com'\n".to_owned(),
        with("allow = ['/a']"),
        with("allow = ['GET a']"),
        with("allow = ['get /a']"),
        with("allow = ['CONNECT /a']"),
        with("allow = ['GET /a/../b']"),
        with("allow = ['GET /a**']"),
        with("deny = ['GET /%61']"),
        with("credential = {}"),
        with("credential = { env = 'A', file = '/b' }"),
        with("credential = { value = 'secret' }"),
        with("credential = { command = ['token'] }"),
        with("credential = { env = 'A', basic = 'u', header = 'x' }"),
        with("credential = { env = 'A', basic = 'a:b' }"),
        with("credential = { env = 'A', header = 'cookie' }"),
        with("headers = ['authorization']"),
        with("headers = ['x-litellm-api-key']"),
        with("headers = ['private-token']\ncredential = { env = 'A', header = 'private-token' }"),
        with("budget = { requests = 0 }"),
        with("budget = { bytes_in = '0' }"),
        with("budget = { per_minute = 0 }"),
        with("budget = { cost_usd = '1' }"),
        with("price_usd = '2'\nbudget = { cost_usd = '1' }"),
        with("budget = { calls = 1 }"),
        with("timeout = '0s'"),
        with("ca_file = '/no/such/file'"),
        with("env = { '1A' = '${URL}' }"),
        with("env = { GIT_CONFIG_COUNT = '1' }"),
        with("git = ['github.com']"),
        tunnel("allow_private_addresses = true").replace("api.example.com", "10.0.0.1"),
        tunnel("") + &tunnel("").replace("connections.api", "connections.same"),
        with(
            "env = { A = '1' }\n[connections.two]\nurl = 'https://example.com'\nenv = { A = '2' }",
        ),
    ];
    let refuse = |table: &String| tool_settings(table).check().expect_err(table).to_string();
    let errors: Vec<_> = tables.iter().map(refuse).collect();
    insta::assert_snapshot!(errors.join("\n"));
    let mut agent = tool_settings(&with(""));
    agent.agent = Some(agent_listing(&["connect__other"]).into());
    insta::assert_snapshot!(agent.check().unwrap_err(), @"`tools.connections`: the agent's file lists `connect__other`, and there is no connection `other` here; add it, or remove it from `tools` in the agent's file");
    // The names of a server's tools would be those of connections.
    let table = with("[mcp.connect]\nurl = 'https://example.com'").parse().unwrap();
    let config = ToolConfig::from_table(&table).unwrap();
    let error =
        ConnectionPolicy::compile_policy(&config, None, &ConnectionHost::for_check()).unwrap_err();
    insta::assert_snapshot!(error, @"`tools.mcp.connect`: is a name that connections use; give the server another name");
}

/// T6: a connection without rules allows nothing.
#[tokio::test]
async fn an_empty_list_allows_nothing() {
    let table = "[connections.api]\nurl = 'https://api.example.com'\n";
    let app = TestApp::with(|config| config.tools = tool_settings(table)).await;
    for path in ["/", "/a", "/a/b"] {
        let refused = app.client().get(&format!("/connect/api{path}")).await;
        assert_eq!(refused.json()["error"]["rule"], "allow");
    }
    app.stop().await;
}

/// T6: a sandbox gets the variables of the connections that its agent may use.
#[test]
fn a_sandbox_gets_the_variables_of_its_connections() {
    let table = "
        [connections.pypi]
        url = 'https://pypi.example.com'
        env = { PIP_INDEX_URL = '${URL}/simple', PIP_RETRIES = '0' }
        [connections.git-one]
        url = 'https://one.example.com'
        git = ['https://one.example.com/', 'ssh://git@one.example.com/']
        [connections.git-two]
        url = 'https://two.example.com'
        git = ['https://two.example.com/']
    ";
    let lines = |settings: &ToolSettings| {
        let variables = connection_variables(settings).unwrap();
        variables.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>()
    };
    insta::assert_snapshot!(lines(&tool_settings(table)).join("\n"), @r"
    GIT_CONFIG_COUNT=3
    GIT_CONFIG_KEY_0=url.http://localhost:8080/connect/git-one/.insteadOf
    GIT_CONFIG_KEY_1=url.http://localhost:8080/connect/git-one/.insteadOf
    GIT_CONFIG_KEY_2=url.http://localhost:8080/connect/git-two/.insteadOf
    GIT_CONFIG_VALUE_0=https://one.example.com/
    GIT_CONFIG_VALUE_1=ssh://git@one.example.com/
    GIT_CONFIG_VALUE_2=https://two.example.com/
    PIP_INDEX_URL=http://localhost:8080/connect/pypi/simple
    PIP_RETRIES=0
    ");
    let agent = Some(agent_listing(&["connect__git-two"]).into());
    let settings = ToolSettings { agent, ..tool_settings(table) };
    insta::assert_snapshot!(lines(&settings).join("\n"), @r"
    GIT_CONFIG_COUNT=1
    GIT_CONFIG_KEY_0=url.http://localhost:8080/connect/git-two/.insteadOf
    GIT_CONFIG_VALUE_0=https://two.example.com/
    ");
}

/// Returns what `explain` says of a request with this first line, to a gateway with one connection.
fn explain_request(line: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gateway.toml");
    let table = "[tools.connections.api]\nurl = 'https://api.example.com'\nallow = ['GET /repos/acme/**']\ndeny = ['* /**/secrets/**']\nprice_usd = '0.001'\n";
    std::fs::write(&file, table).unwrap();
    let arguments = ["explain", "-", "--config", file.to_str().unwrap()];
    let matches = explain::command().try_get_matches_from(arguments).unwrap();
    let request = format!("{line} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let mut output = vec![];
    explain::run(&matches, request.as_bytes(), &mut output).unwrap();
    String::from_utf8(output).unwrap()
}

/// T7: `explain` names the layer and the rule that decide about a request over a connection.
#[test]
fn explain_names_the_rule() {
    insta::assert_snapshot!(explain_request("GET /connect/api/repos/acme/site"), @r"
    connection api
    allowed    by every layer; rule: allow[0]
    reserves   1 request, $0.001
    ");
    insta::assert_snapshot!(explain_request("GET /connect/api/repos/acme/secrets"), @r"
    connection api
    refused    policy_denied: layer connection, rule deny[0]
               the connection's rules do not allow this request
    ");
    insta::assert_snapshot!(explain_request("POST /connect/api/repos/acme/site"), @r"
    connection api
    refused    policy_denied: layer connection, rule allow
               the connection's rules do not allow this request
    ");
    insta::assert_snapshot!(explain_request("GET /connect/other/a"), @r"
    connection other
    refused    policy_denied: layer run, rule granted
               this run may not use this connection; `GET /connect` names the ones that it may use
    ");
    insta::assert_snapshot!(explain_request("GET /connect"), @r"
    connections of the run
    allowed    lists: api
    reserves   nothing
    ");
    insta::assert_snapshot!(explain_request("POST /connect"), @r"
    connections of the run
    refused    not_found
               the path is not served; there are `GET /connect` and `/connect/NAME/PATH`
    ");
    insta::assert_snapshot!(explain_request("GET http://evil.example/connect/api/repos/acme/site"), @r"
    connection api
    refused    not_found
               the path is not served
    ");
}

/// T6: `explain` knows what a connection refuses before its rules.
#[test]
fn explain_knows_the_checks_of_a_request() {
    let with = |header: &str| {
        explain_request(&format!(
            "GET /connect/api/repos/acme/site HTTP/1.1\r\n{header}\r\nx: GET /"
        ))
    };
    insta::assert_snapshot!(with("host: other"), @r"
    connection api
    refused    repeated_host
               the request has two `Host` headers; send one
    ");
    insta::assert_snapshot!(with("upgrade: websocket"), @r"
    connection api
    refused    upgrade_refused
               a connection carries no other protocol; send the request without `Upgrade`
    ");
    insta::assert_snapshot!(with("origin: https://evil.example"), @r"
    connection api
    refused    foreign_origin
               the request comes from a page of another origin
    ");
    insta::assert_snapshot!(with("sec-fetch-site: cross-site"), @r"
    connection api
    refused    foreign_origin
               the request comes from a page of another origin
    ");
    insta::assert_snapshot!(explain_request("GET /connect/api//a"), @r"
    connection api
    refused    ambiguous_path
               the path could be read in two ways: it has an empty segment
    ");
}
