//! T6, T7: Tests of what a configuration with tunnels gives: the variables of a sandbox, and what `explain` says.

use cogni_gateway::cli::explain;
use cogni_gateway::gateway::run::ToolSettings;
use cogni_gateway::runner::tool_opener::{connection_variables, has_tunnels};

use crate::tools::{agent_listing, tool_settings};

const TABLE: &str = "
    [connections.api]
    url = 'https://api.example.com/v3'
    allow = ['GET /repos/acme/**']
    tunnel = true
    price_usd = '0.001'
    [connections.other]
    url = 'https://other.example.com'
    allow = ['GET /**']
    env = { NO_PROXY = 'own' }
";

/// T6: a sandbox whose agent may use a tunnel gets the variables for it; a connection's own variable stays.
#[test]
fn a_sandbox_gets_the_variables_of_its_tunnels() {
    let settings = tool_settings(TABLE);
    assert!(has_tunnels(&settings).unwrap());
    let variables = connection_variables(&settings).unwrap();
    let lines: Vec<_> = variables.iter().map(|(name, value)| format!("{name}={value}")).collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    CARGO_HTTP_CAINFO=/run/tunnel-ca.pem
    CURL_CA_BUNDLE=/run/tunnel-ca.pem
    DENO_CERT=/run/tunnel-ca.pem
    GIT_SSL_CAINFO=/run/tunnel-ca.pem
    HTTPS_PROXY=http://localhost:8080
    NODE_EXTRA_CA_CERTS=/run/tunnel-ca.pem
    NODE_USE_ENV_PROXY=1
    NO_PROXY=own
    PIP_CERT=/run/tunnel-ca.pem
    REQUESTS_CA_BUNDLE=/run/tunnel-ca.pem
    SSL_CERT_FILE=/run/tunnel-ca.pem
    https_proxy=http://localhost:8080
    no_proxy=localhost,127.0.0.1,::1
    npm_config_cafile=/run/tunnel-ca.pem
    ");
    let agent = Some(agent_listing(&["connect__other"]).into());
    let settings = ToolSettings { agent, ..tool_settings(TABLE) };
    assert!(!has_tunnels(&settings).unwrap());
    let variables = connection_variables(&settings).unwrap();
    assert_eq!(variables.into_keys().collect::<Vec<_>>(), ["NO_PROXY"]);
}

fn explain_text(request: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("gateway.toml");
    std::fs::write(&file, TABLE.replace("[connections", "[tools.connections")).unwrap();
    let arguments = ["explain", "-", "--config", file.to_str().unwrap()];
    let matches = explain::command().try_get_matches_from(arguments).unwrap();
    let mut output = vec![];
    match explain::run(&matches, request.as_bytes(), &mut output) {
        Ok(_) => String::from_utf8(output).unwrap(),
        Err(error) => format!("{error:#}"),
    }
}

/// T7: `explain` decides about a tunnel, and about the request in it, like the gateway.
#[test]
fn explain_decides_about_a_tunnel_and_the_request_in_it() {
    let tunnel = "CONNECT api.example.com:443 HTTP/1.1\r\nhost: api.example.com:443\r\n\r\n";
    let with = |path: &str, host: &str| {
        explain_text(&format!("{tunnel}GET {path} HTTP/1.1\r\nhost: {host}\r\n\r\n"))
    };
    insta::assert_snapshot!(explain_text(tunnel), @r"
    connection api
    allowed    opens a tunnel
    reserves   nothing
    ");
    insta::assert_snapshot!(with("/v3/repos/acme/site", "api.example.com"), @r"
    connection api
    allowed    by every layer; rule: allow[0]
    reserves   1 request, $0.001
    ");
    insta::assert_snapshot!(with("/v3/repos/evil/site", "api.example.com"), @r"
    connection api
    refused    policy_denied: layer connection, rule allow
               the connection's rules do not allow this request
    ");
    insta::assert_snapshot!(with("/repos/acme/site", "api.example.com"), @r"
    connection api
    refused    policy_denied: layer connection, rule url
               the connection's rules do not allow this request
    ");
    insta::assert_snapshot!(with("/v3/repos/acme/site", "other.example.com"), @r"
    connection api
    refused    tunnel_mismatch
               the request in the tunnel is for another host than the tunnel; open a tunnel for each host
    ");
    insta::assert_snapshot!(explain_text("CONNECT other.example.com:443 HTTP/1.1\r\n\r\n"), @r"
    connections of the run
    refused    policy_denied: layer run, rule granted
               no connection of this run has a tunnel to this host and port; `GET /connect` names the tunnels that it may use
    ");
    insta::assert_snapshot!(explain_text("CONNECT api.example.com HTTP/1.1\r\n\r\n"), @r"
    connections of the run
    refused    invalid_tunnel
               the `CONNECT` request names no port; send `CONNECT HOST:PORT` without a body
    ");
    insta::assert_snapshot!(explain_text("GET /connect/ca.pem HTTP/1.1\r\n\r\n"), @r"
    connections of the run
    allowed    the certificate of tunnels
    reserves   nothing
    ");
    let text = explain_text(&format!("{tunnel}GET / HTTP/1.1\r\n"));
    assert!(text.contains("what follows the `CONNECT` request is not a request"), "{text}");
}
