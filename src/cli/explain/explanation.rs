//! What becomes of a request, step by step, as a value.

use std::borrow::Cow;
use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request};
use serde::Serialize;

use super::asked::Asked;
use super::remedy::remedy;
use crate::body::{Call, Change};
use crate::budget::{Amount, Ledger, Status};
use crate::config::Config;
use crate::gateway::admission::Admission;
use crate::gateway::answer;
use crate::gateway::policy::Policy;
use crate::gateway::receive;
use crate::gateway::rejection::Rejection;
use crate::gateway::request;
use crate::protocol::{Protocol, Route};
use crate::run::RequestId;
use crate::upstream::headers::Outgoing;

/// By what a request is judged.
#[derive(Clone, Copy)]
pub struct Case<'a> {
    pub config: &'a Config,
    pub policy: &'a Policy,
    pub ledger: &'a Arc<Ledger>,
}

/// What becomes of a request.
#[derive(Debug, Serialize)]
pub struct Explanation {
    pub method: String,
    pub path: String,
    /// The name of the route, where the path is one; see `is_guessed`.
    pub route: Option<&'static str>,
    pub is_guessed: bool,
    pub outcome: Outcome,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<Refusal>,
    /// What becomes of the query string, where there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub query: Option<Fate>,
    pub headers: Vec<Header>,
    pub body: Vec<Field>,
    /// The rules that matched.
    pub rules: Vec<Arc<str>>,
    /// By the upstream's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Box<str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved: Option<Amount>,
    /// What the budget was before the call.
    pub budget: Status,
    /// The request that would be sent, secrets masked.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub upstream: Option<String>,
}

/// How it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It goes upstream.
    Admitted,
    /// The gateway answers it itself.
    Answered,
    Refused,
}

/// What the client would be told, and what an operator can do about it.
#[derive(Debug, Serialize)]
pub struct Refusal {
    pub status: u16,
    pub code: &'static str,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<&'static str>,
}

/// What becomes of a header.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Header {
    pub name: String,
    pub what: Fate,
    /// What goes upstream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<Cow<'static, str>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It goes up as the client sent it.
    Passed,
    /// It goes up with a value of ours, or with a part of the client's.
    Overwritten,
    /// It goes up although the client did not send it.
    Set,
    /// It does not go up.
    Dropped,
}

/// What becomes of a field of the body that does not go up as it is.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Field {
    pub name: Cow<'static, str>,
    pub what: &'static str,
    pub why: &'static str,
}

impl Fate {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Overwritten => "overwritten",
            Self::Set => "set",
            Self::Dropped => "dropped",
        }
    }
}

impl Explanation {
    /// Goes the way of a request through the gateway, to its end or to the first refusal.
    pub fn of(case: &Case<'_>, asked: Asked) -> Self {
        let Asked { request, body, is_guessed } = asked;
        let mut told = Self {
            method: request.method().to_string(),
            path: request.uri().to_string(),
            route: None,
            is_guessed,
            outcome: Outcome::Admitted,
            refusal: None,
            query: None,
            headers: vec![],
            body: vec![],
            rules: vec![],
            model: None,
            reserved: None,
            budget: case.ledger.status(),
            upstream: None,
        };
        let route = match request::route(&request) {
            Ok(route) => route,
            Err(rejection) => {
                told.refuse(&rejection, Protocol::Chat);
                return told;
            }
        };
        told.route = Some(route.name());
        if answer::is_own(case.policy, route) {
            told.outcome = Outcome::Answered;
        } else if let Err(rejection) = told.follow(case, route, &request, body) {
            told.refuse(&rejection, route.protocol());
        }
        told
    }

    /// The same steps as in `gateway::serve`.
    fn follow(
        &mut self,
        case: &Case<'_>,
        route: Route,
        request: &Request<()>,
        body: Bytes,
    ) -> Result<(), Rejection> {
        let Case { config, policy, ledger } = *case;
        request::check_head(request, &policy.config)?;
        let admission = Admission { policy, identity: &config.identity, ledger };
        let entry = admission.enter(route)?;
        let (headers, overwrites) = (&policy.config.headers, Arc::clone(&policy.overwrites));
        let mut head = Outgoing::new(route, request, headers, overwrites, &RequestId::new());
        let mut call = Call::default();
        if route.method() == http::Method::POST {
            let body = receive::whole(route, body, &policy.config)?;
            (call, self.rules) = admission.judge(body, &mut head)?;
        }
        let reserved = admission.reserve(entry, route, &mut call).map(|reservation| {
            let granted = reservation.granted();
            reservation.release();
            granted
        });
        self.model.clone_from(&call.model);
        self.body = call.changes.iter().map(Field::of).collect();
        let body: Vec<u8> = call.into_body().iter().flatten().copied().collect();
        let sent = head.request(&config.upstream.url, body.len() as u64);
        let is_sent = sent.uri().query().is_some();
        self.query =
            request.uri().query().map(|_| if is_sent { Fate::Passed } else { Fate::Dropped });
        self.headers = fates(request.headers(), sent.headers());
        self.upstream = Some(upstream(&head, sent.headers(), &body));
        self.reserved = Some(reserved?);
        Ok(())
    }

    fn refuse(&mut self, rejection: &Rejection, protocol: Protocol) {
        self.outcome = Outcome::Refused;
        self.upstream = None;
        let (status, code) = (rejection.status(protocol).as_u16(), rejection.code());
        let message = rejection.to_string();
        self.refusal = Some(Refusal { status, code, message, remedy: remedy(code) });
        if let Rejection::Rule(refusal) = rejection {
            self.rules = vec![refusal.rule()];
        }
    }
}

impl Field {
    fn of(change: &Change) -> Self {
        let (name, what, why) = (change.field.clone(), change.what.as_str(), change.why.text());
        Self { name, what, why }
    }
}

/// What becomes of the client's headers, and what else goes up, in the order of their names.
fn fates(given: &HeaderMap, sent: &HeaderMap) -> Vec<Header> {
    let mut headers: Vec<_> = sent
        .iter()
        .map(|(name, value)| {
            let what = match given.get(name) {
                Some(given) if given == value => Fate::Passed,
                Some(_) => Fate::Overwritten,
                None => Fate::Set,
            };
            Header { name: name.to_string(), what, value: Some(shown(name.as_str(), value)) }
        })
        .collect();
    let dropped = given.keys().filter(|name| !sent.contains_key(*name) && *name != "host");
    headers.extend(dropped.map(|name| Header {
        name: name.to_string(),
        what: Fate::Dropped,
        value: None,
    }));
    headers.sort_by(|one, other| one.name.cmp(&other.name));
    headers
}

fn shown(name: &str, value: &HeaderValue) -> Cow<'static, str> {
    match name {
        _ if value.is_sensitive() => Cow::Borrowed("[secret]"),
        "x-litellm-call-id" => Cow::Borrowed("[id of the request]"),
        _ => Cow::Owned(String::from_utf8_lossy(value.as_bytes()).into_owned()),
    }
}

/// The request as it goes over the wire, with `sent` to know its secrets by.
fn upstream(head: &Outgoing, sent: &HeaderMap, body: &[u8]) -> String {
    let head = head.http1(body.len() as u64);
    let lines = String::from_utf8_lossy(&head).replace('\r', "");
    let lines = lines.lines().map(|line| {
        let name = line.split_once(": ").map_or("", |(name, _)| name);
        sent.get(name).map_or(line.to_owned(), |value| format!("{name}: {}", shown(name, value)))
    });
    lines.collect::<Vec<_>>().join("\n") + "\n" + &String::from_utf8_lossy(body)
}
