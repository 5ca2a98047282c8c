//! One request of the matrix: a spoofed value on one route.

use std::{fmt, fs};

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::peers::setup::peers_file;

/// A route for spoofed values, with an honest request body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpoofRoute {
    Chat,
    Responses,
    Messages,
    Embeddings,
    CountTokens,
}

/// The outcomes that are allowed for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExpectedOutcomes {
    /// The request is served as if the spoofed value were absent.
    Served,
    /// The request is either served in that way or refused by the gateway.
    Either,
    /// The gateway refuses the request.
    Refused,
}

/// A request with its description.
pub(super) struct MatrixCase {
    pub(super) route: SpoofRoute,
    pub(super) lie: String,
    /// The text that replaces `ATTACKER` in this request, and in no other.
    pub(super) mark: String,
    pub(super) expect: ExpectedOutcomes,
    pub(super) bytes: Vec<u8>,
    /// The spoofed members of the body.
    pub(super) members: Map<String, Value>,
}

/// The parsed file `tests/peers/spoof.toml`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SpoofedValues {
    headers: Vec<String>,
    repeated_headers: Vec<String>,
    members: Vec<String>,
    models: Vec<String>,
    duplicates: Vec<String>,
    pub(super) targets: Vec<String>,
}

impl SpoofedValues {
    pub(super) fn read() -> Self {
        toml::from_str(&fs::read_to_string(peers_file("spoof.toml")).unwrap()).unwrap()
    }

    /// Returns the names of the headers.
    pub(super) fn headers(&self) -> impl Iterator<Item = &str> {
        self.headers.iter().map(|header| header.split(':').next().unwrap())
    }

    /// Returns every spoofed value on every route.
    pub(super) fn cases(&self) -> Vec<MatrixCase> {
        let mut cells = vec![];
        for route in SpoofRoute::ALL {
            let mut add = |expect, lie: &str, header: &str, member: &str| {
                let mark = format!("{MARK}{:04}", cells.len());
                let [header, member] = [header, member].map(|text| text.replace("ATTACKER", &mark));
                let members = parse_members(&member);
                let bytes = route.request(&header, &members, &member);
                cells.push(MatrixCase { route, lie: lie.to_owned(), mark, expect, bytes, members });
            };
            for header in &self.headers {
                add(ExpectedOutcomes::Served, header, &format!("{header}\r\n"), "");
            }
            for name in &self.repeated_headers {
                let twice = format!("{name}: ATTACKER\r\n{name}: ATTACKER\r\n");
                add(ExpectedOutcomes::Served, &format!("{name}, twice"), &twice, "");
            }
            for member in &self.members {
                add(ExpectedOutcomes::Either, member, "", member);
            }
            for member in &self.duplicates {
                add(ExpectedOutcomes::Refused, member, "", member);
            }
        }
        cells
    }

    /// Returns every model name on every route, for a run that may use any model.
    pub(super) fn named_models(&self) -> Vec<MatrixCase> {
        let pairs = SpoofRoute::ALL
            .into_iter()
            .flat_map(|route| self.models.iter().map(move |model| (route, model)));
        let cells = (FIRST_MODEL_MARK..).zip(pairs).map(|(number, (route, model))| {
            let mark = format!("{MARK}{number}");
            let member = format!("\"model\": {}", model.replace("ATTACKER", &mark));
            let members = parse_members(&member);
            let bytes = route.request("", &members, &member);
            MatrixCase {
                route,
                lie: member,
                mark,
                expect: ExpectedOutcomes::Refused,
                bytes,
                members,
            }
        });
        cells.collect()
    }
}

impl fmt::Display for MatrixCase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with `{}`", self.route.path(), self.lie)
    }
}

impl SpoofRoute {
    pub(super) const ALL: [Self; 5] =
        [Self::Chat, Self::Responses, Self::Messages, Self::Embeddings, Self::CountTokens];

    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Embeddings => "/v1/embeddings",
            Self::CountTokens => "/v1/messages/count_tokens",
        }
    }

    /// Returns whether LiteLLM reports a call on this route to its callbacks.
    pub(super) fn is_reported_to_callback(self) -> bool {
        self != Self::CountTokens
    }

    /// Returns a request with only the required content.
    pub(super) fn honest(self) -> Vec<u8> {
        self.request("", &Map::new(), "")
    }

    /// Returns an honest request with `header` and `members` added; an added value replaces the honest one of the same
    /// name.
    fn request(self, header: &str, members: &Map<String, Value>, member: &str) -> Vec<u8> {
        let messages = json!([{ "role": "user", "content": "hello" }]);
        let honest = match self {
            Self::Chat => json!({ "model": "gpt", "max_tokens": 64, "messages": messages }),
            Self::Responses => json!({ "model": "gpt", "max_output_tokens": 64, "input": "hello" }),
            Self::Messages => json!({ "model": "claude", "max_tokens": 64, "messages": messages }),
            Self::Embeddings => json!({ "model": "gpt", "input": "hello" }),
            Self::CountTokens => json!({ "model": "claude", "messages": messages }),
        };
        let kept =
            honest.as_object().unwrap().iter().filter(|(key, _)| !members.contains_key(*key));
        let kept = kept.map(|(key, value)| format!("{}: {value}", json!(key)));
        let all: Vec<_> =
            kept.chain(Some(member.to_owned()).filter(|member| !member.is_empty())).collect();
        let body = format!("{{{}}}", all.join(", "));
        let name = header.split(':').next().unwrap().to_ascii_lowercase();
        let host = if name == "host" { "" } else { "host: localhost\r\n" };
        let path = self.path();
        format!(
            "POST {path} HTTP/1.1\r\n{host}connection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n{header}\r\n{body}",
            body.len()
        )
        .into_bytes()
    }
}

fn parse_members(text: &str) -> Map<String, Value> {
    serde_json::from_str(&format!("{{{text}}}")).unwrap()
}

/// The first mark of the cases with model names; the other cases are fewer than this.
const FIRST_MODEL_MARK: u32 = 8000;

/// The prefix of all marks; four digits follow.
pub(super) const MARK: &str = "attacker-";
