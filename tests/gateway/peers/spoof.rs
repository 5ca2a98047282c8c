//! Tests that spoofed headers, fields and paths of an agent have no effect on a real LiteLLM.
//!
//! Each entry of `tests/peers/spoof.toml` becomes a request on each route. LiteLLM's callback and the provider behind
//! LiteLLM record what they receive, and the records of a spoofed request must equal those of an honest request.

mod litellm_callback;
mod matrix_case;

use std::collections::BTreeSet;

use serde_json::Value;

use self::litellm_callback::CallbackRecords;
use self::matrix_case::{ExpectedOutcomes, MARK, MatrixCase, SpoofRoute, SpoofedValues};
use super::parse_lines;
use super::setup::{LitellmProxy, ProxySetup, start_provider};
use crate::support::client::TestClient;

/// G3, G4, G5, G6: Spoofed headers, members of the body, duplicate keys and paths have no effect on any route.
#[tokio::test]
async fn spoofed_values_never_reach_litellm() {
    let lies = SpoofedValues::read();
    let litellm = LitellmProxy::start();
    let place = ProxySetup::start(&litellm.address, &[("MODELS", "gpt,claude")]);
    let client = TestClient::new(&place.socket());

    let mut honest = vec![];
    for route in SpoofRoute::ALL.into_iter().filter(|route| route.is_reported_to_callback()) {
        let pair = [client.raw(&route.honest()).await, client.raw(&route.honest()).await];
        honest.push((route, pair.map(|answer| call_of(&answer).unwrap())));
    }
    let (mut wrong, mut served) = (vec![], vec![]);
    for cell in lies.cases() {
        let answer = client.raw(&cell.bytes).await;
        match is_served(&cell, &answer) {
            Ok(true) => served.push((call_of(&answer), cell)),
            Ok(false) => {}
            Err(complaint) => wrong.push(complaint),
        }
    }
    for target in &lies.targets {
        let answer = client.raw(format!("{target} HTTP/1.1\r\n{CLOSE}\r\n").as_bytes()).await;
        if !["HTTP/1.1 404 ", "HTTP/1.1 400 "].iter().any(|refused| answer.starts_with(refused)) {
            wrong.push(format!("{target}: {answer}"));
        }
    }

    let open = ProxySetup::start(&litellm.address, &[]);
    let client = TestClient::new(&open.socket());
    for cell in lies.named_models() {
        wrong.extend(is_served(&cell, &client.raw(&cell.bytes).await).err());
    }

    let records = place.ends_with_a_whole_record();
    let callback_records = CallbackRecords::of(&litellm, served.len() + 2 * honest.len());
    for (route, [call, again]) in &honest {
        callback_records.knows_the_truth(call);
        let cells = served.iter().filter(|(_, cell)| cell.route == *route);
        for (lied, cell) in cells {
            wrong.extend(callback_records.difference([call, again], lied.as_deref(), cell));
        }
    }
    wrong.extend(unrecorded_calls(&records, &served));
    wrong.extend(marked_requests(&litellm, &served));
    wrong.extend(with_other_credentials(&litellm.forwarded()));
    wrong.extend(unlisted_requests(&litellm.output()));
    assert!(wrong.is_empty(), "{} of these:\n{}", wrong.len(), wrong.join("\n"));
}

/// G4: A list of models is requested with the gateway's identity, whatever the client claims.
#[tokio::test]
async fn the_model_list_is_requested_with_the_gateways_identity() {
    let provider = start_provider("");
    let place = ProxySetup::start(&provider.address, &[]);
    let client = TestClient::new(&place.socket());
    for lie in SpoofedValues::read().headers() {
        let head =
            format!("GET /v1/models?key={MARK}0#{MARK}0 HTTP/1.1\r\n{CLOSE}{lie}: {MARK}0\r\n\r\n");
        // `CLOSE` has the host already, and a request with two hosts is refused.
        let expected = if lie == "host" { "HTTP/1.1 400 " } else { "HTTP/1.1 200 " };
        assert!(client.raw(head.as_bytes()).await.starts_with(expected), "{lie}");
    }
    let seen = super::setup::get_url(&format!("http://{}/_seen", provider.address));
    assert!(seen.contains("x-litellm-end-user-id") && !seen.contains(MARK), "{seen}");
}

/// Returns whether a request went upstream, or an error if its outcome is wrong.
fn is_served(cell: &MatrixCase, answer: &str) -> Result<bool, String> {
    let head = answer.split("\r\n\r\n").next().unwrap_or_default();
    let is_refused = head.starts_with("HTTP/1.1 4") && head.contains("x-should-retry: false");
    let is_served = head.starts_with("HTTP/1.1 200 ");
    match cell.expect {
        ExpectedOutcomes::Served | ExpectedOutcomes::Either if is_served => Ok(true),
        ExpectedOutcomes::Refused | ExpectedOutcomes::Either if is_refused => Ok(false),
        _ => Err(format!("{cell}: it should be {:?}: {answer}", cell.expect)),
    }
}

/// Returns LiteLLM's call id from the answer's head.
fn call_of(answer: &str) -> Option<String> {
    let id = answer.lines().find_map(|line| line.strip_prefix("x-litellm-call-id: "));
    id.map(str::to_owned)
}

/// G11: Returns calls whose id in LiteLLM differs from the id in the audit log.
fn unrecorded_calls(records: &[Value], served: &[(Option<String>, MatrixCase)]) -> Vec<String> {
    let admitted: BTreeSet<_> = records
        .iter()
        .filter(|record| record["event"] == "request.admitted")
        .map(|record| record["request"].as_str().unwrap())
        .collect();
    let strange = served
        .iter()
        .filter(|(call, _)| call.as_ref().is_some_and(|call| !admitted.contains(call.as_str())));
    strange.map(|(call, cell)| format!("{cell}: LiteLLM knows it as {call:?}")).collect()
}

/// Returns spoofed requests whose mark appears in anything that LiteLLM or the provider received.
fn marked_requests(
    litellm: &LitellmProxy,
    served: &[(Option<String>, MatrixCase)],
) -> BTreeSet<String> {
    let saw = [
        ("LiteLLM", litellm.callback_lines()),
        ("LiteLLM's log", litellm.output()),
        ("the provider", litellm.forwarded()),
    ];
    let mut marked = BTreeSet::new();
    for (who, text) in &saw {
        for (at, _) in text.match_indices(MARK) {
            let mark = text.get(at..at + MARK.len() + 4).unwrap_or_default();
            let known = served.iter().find(|(_, cell)| cell.mark == mark);
            marked.insert(match known {
                Some((_, cell)) => format!("{cell}: {who} saw it"),
                None => format!("{mark}, which was refused: {who} saw it"),
            });
        }
    }
    marked
}

/// Returns requests that reached the provider with credentials other than LiteLLM's own.
fn with_other_credentials(forwarded: &str) -> BTreeSet<String> {
    let mut strange = BTreeSet::new();
    for request in parse_lines(forwarded) {
        let named = |header: &&Value| {
            ["authorization", "x-api-key", "api-key"].contains(&header[0].as_str().unwrap())
        };
        let keys: Vec<_> = request["headers"].as_array().unwrap().iter().filter(named).collect();
        let keys = serde_json::to_string(&keys).unwrap();
        if ![
            r#"[["authorization","Bearer sk-provider-gpt"]]"#,
            r#"[["x-api-key","sk-provider-claude"]]"#,
        ]
        .contains(&keys.as_str())
        {
            strange.insert(format!("{}: the provider was shown {keys}", request["path"]));
        }
    }
    strange
}

/// Returns requests in LiteLLM's log that the test did not make, or that LiteLLM did not serve.
fn unlisted_requests(said: &str) -> BTreeSet<String> {
    let ours = |line: &&str| {
        let health = line.contains(r#""GET /health/liveliness HTTP/1.1" 200"#);
        let served =
            |route: SpoofRoute| line.contains(&format!(r#""POST {} HTTP/1.1" 200"#, route.path()));
        !health && !SpoofRoute::ALL.into_iter().any(served)
    };
    let requests = said.lines().filter(|line| line.contains(" HTTP/1.1\" "));
    requests.filter(ours).map(|line| format!("LiteLLM was asked: {line}")).collect()
}

const CLOSE: &str = "host: localhost\r\nconnection: close\r\ncontent-length: 0\r\n";
