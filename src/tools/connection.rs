//! The connections of a run: requests to servers that the operator names, with credentials that the host holds.
//!
//! A request to `/connect/NAME/PATH` on the run's socket takes this way:
//!
//! 1. Every layer must name the connection; [`request_path`] must read the path in one way; the [rules](path_rule) must
//!    allow it ([`policy`]).
//! 2. The budget is [reserved](checked_request), the rules about what the run has [seen](super::taint) are asked, the
//!    [credential] is read, and the admission is recorded.
//! 3. The [client] sends the request to the connection's host, with the [headers] that pass and the credential.
//! 4. Both [bodies](body) stream. Bytes are taken from the budget before they pass. The rules are asked again before each
//!    part of the request's body, and the answer is searched for the credential.
//! 5. The [exchange] settles, once.
//!
//! A program that insists on the server's own address opens a [tunnel]. TLS ends here, with a certificate of the run's own
//! [authority](tunnel_authority), and each request in the tunnel takes the same way.
//!
//! **Invariant:** a credential goes to its own host only, over TLS, never after a redirect, and never to the agent.
//!
//! **Invariant:** nothing is sent without a durable `connect.admitted` record, and each such record is followed by one
//! `connect.settled` record.

pub mod aws_signature;
mod aws_signing;
mod body;
mod body_judge;
pub mod checked_request;
pub mod client;
mod credential;
mod credential_program;
pub mod environment;
mod exchange;
mod headers;
mod link_rewriter;
pub mod path_rule;
pub mod policy;
mod query;
pub mod refusal;
pub mod request_path;
mod reserved_headers;
pub mod tunnel;
mod tunnel_address;
mod tunnel_authority;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use bytes::Bytes;
use http::uri::Authority;
use http::{HeaderMap, Method, Request, Response, header, request};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use serde_json::json;
use uuid::Uuid;

use self::body::{AnswerBody, ConnectRequestBody};
use self::body_judge::BodyJudge;
use self::checked_request::{CheckedConnect, ConnectAsk, check_request, reserve_request};
use self::client::SendFault;
use self::credential::ReadCredential;
use self::credential_program::CredentialFault;
use self::environment::SANDBOX_URL;
use self::exchange::{ConnectExchange, SharedReservation, StopSignal};
use self::headers::{AnswerFault, answered_headers};
use self::link_rewriter::LinkRewriter;
use self::policy::{Connection, ConnectionPolicy};
use self::refusal::{ConnectRefusal, fault_response};
use self::tunnel::RunTunnels;
use super::connection_config::AGENT_PREFIX;
use super::origin::is_origin_known;
use super::refusal::ToolRefusal;
use super::run_credentials::RunCredentials;
use super::run_tools::RunSwitches;
use super::taint::TaintPolicy;
use crate::base::digest::sha256_hex;
use crate::base::streamed_endpoint::{
    CONNECT_CERTIFICATE_PATH, CONNECT_PATH_PREFIX, OpenTunnel, StreamedBody, StreamedEndpoint,
    StreamedReply, StreamedReplyFuture, StreamedRequest, TunnelRequest,
};
use crate::base::task_group::TaskGroup;
use crate::llm::budget::BudgetLedger;
use crate::telemetry::audit::AuditLog;
use crate::telemetry::audit::connect_records::{
    ConnectAdmittedRecord, ConnectOutcome, ConnectRefusedRecord, ConnectSettledRecord,
};
use crate::telemetry::metrics::MetricsRegistry;

/// The connections of one run.
#[derive(Clone)]
pub struct RunConnections(Arc<ConnectionParts>);

/// The parts of a run that its connections need.
pub struct ConnectionParts {
    pub policy: ConnectionPolicy,
    /// The tunnels of the run; `None` if no connection has one.
    pub tunnels: Option<RunTunnels>,
    /// The rules about what the run has seen.
    pub taint: Arc<TaintPolicy>,
    pub ledger: Arc<BudgetLedger>,
    pub audit: Arc<AuditLog>,
    pub switches: Box<dyn RunSwitches>,
    pub metrics: Arc<MetricsRegistry>,
    /// The credentials that every answer is searched for.
    pub secrets: Arc<RunCredentials>,
    pub tasks: TaskGroup,
    /// The salt of the digests in this process's records of the run.
    pub salt: String,
}

/// The head of a request, and the tunnel that it came through.
#[derive(Clone, Copy)]
pub struct AskedHead<'a> {
    pub head: &'a request::Parts,
    /// The name of the connection whose tunnel it is.
    pub tunnel: Option<&'a str>,
}

/// The facts of a request that the steps share.
struct ConnectCall {
    connection: String,
    method: Method,
    rule: Arc<str>,
    /// The salted digest of the path and the query.
    path: String,
    /// The announced length of the body.
    length: Option<u64>,
    pid: Option<u32>,
}

/// A request that may be sent.
struct AdmittedConnect {
    exchange: ConnectExchange,
    credential: Option<ReadCredential>,
}

impl RunConnections {
    pub fn new(parts: ConnectionParts) -> Self {
        Self(Arc::new(parts))
    }

    async fn answer_request(&self, streamed: StreamedRequest) -> StreamedReply {
        let StreamedRequest { request, pid, tunnel } = streamed;
        let request_bytes = Arc::new(AtomicU64::new(0));
        let (head, body) = request.into_parts();
        let asked = AskedHead { head: &head, tunnel: tunnel.as_deref() };
        let (response, code) = match self.check_and_send((asked, body), pid, &request_bytes).await {
            Ok(answered) => answered,
            Err(refusal) => return self.0.refuse_request((&refusal, asked), pid),
        };
        StreamedReply { response, code, request_bytes }
    }

    /// Takes a request through all steps. Returns the response, and its code if it is an error of this gateway.
    async fn check_and_send(
        &self,
        (asked, body): (AskedHead<'_>, StreamedBody),
        pid: Option<u32>,
        request_bytes: &Arc<AtomicU64>,
    ) -> Result<(Response<StreamedBody>, Option<&'static str>), ConnectRefusal> {
        let (parts, head) = (&self.0, asked.head);
        let length = body.size_hint().exact();
        let checked = match check_request(&parts.policy, asked, length)? {
            ConnectAsk::Send(checked) => *checked,
            ConnectAsk::List => {
                return Ok((own_answer("application/json", self.list_connections()), None));
            }
            ConnectAsk::Certificate => {
                let tunnels = parts.tunnels.as_ref().ok_or(ConnectRefusal::NotServed)?;
                let text = tunnels.certificate_pem().to_owned();
                return Ok((own_answer("application/x-pem-file", text), None));
            }
        };
        let CheckedConnect { connection, rule, uri, headers } = checked;
        let call = ConnectCall {
            connection: connection.name.to_string(),
            method: head.method.clone(),
            rule,
            path: parts.path_digest(asked),
            length,
            pid,
        };
        // A client that leaves now must not tear the admission from its settlement.
        let admission = Arc::clone(parts).admit_request(call);
        let AdmittedConnect { mut exchange, credential } =
            parts.tasks.run_detached(admission).await?;
        let reservation = exchange.reservation().clone();
        let judge = BodyJudge::for_connection((&parts.taint, &parts.ledger), &connection.name);
        let passed = Arc::clone(request_bytes);
        let mut request = Request::new(ConnectRequestBody::new(body, (reservation, judge), passed));
        (*request.method_mut(), *request.uri_mut()) = (head.method.clone(), uri);
        *request.headers_mut() = headers;
        let stop = parts.stop_signal();
        let asking = (request, credential);
        let sent = send_until_stopped(connection, asking, (&stop, request_bytes)).await;
        let answered = match sent {
            Ok(answer) => self.pass_answer((connection, asked), answer, (exchange, stop)),
            Err(ConnectOutcome::NotSent) => {
                exchange.outcome = ConnectOutcome::NotSent;
                return Err(ConnectRefusal::TooManyLookups);
            }
            Err(outcome) => {
                exchange.outcome = outcome;
                Err(outcome)
            }
        };
        Ok(match answered {
            Ok(response) => (response, None),
            Err(outcome) => {
                let (response, code) = fault_response(outcome);
                (response.map(full_body), Some(code))
            }
        })
    }

    /// Returns the response for an answer. An error is the outcome of a request whose answer must not pass.
    fn pass_answer(
        &self,
        (connection, asked): (&Connection, AskedHead<'_>),
        answer: Response<Incoming>,
        (mut exchange, stop): (ConnectExchange, StopSignal),
    ) -> Result<Response<StreamedBody>, ConnectOutcome> {
        exchange.status = answer.status().as_u16();
        let guard = self.0.secrets.guard_answer();
        let guarded = (guard.as_ref(), connection.credential.is_some());
        let mut headers = match answered_headers(&answer, guarded) {
            Ok(headers) => headers,
            Err(fault) => {
                exchange.outcome = match fault {
                    AnswerFault::Echoed => ConnectOutcome::CredentialEchoed,
                    AnswerFault::Encoded => ConnectOutcome::EncodedResponse,
                };
                return Err(exchange.outcome);
            }
        };
        // A client in a tunnel uses the servers' own addresses.
        let rewrites_links = connection.rewrites_links && asked.tunnel.is_none();
        let links = rewrites_links
            .then(|| self.0.policy.rewritten_links(connection, &sandbox_url(&asked.head.headers)));
        let status = answer.status();
        let links =
            links.and_then(|links| LinkRewriter::rewrite_headers(links, (status, &mut headers)));
        let inner = answer.into_body();
        let (timeout, has_ended, first) = (connection.timeout, inner.is_end_stream(), None);
        if has_ended {
            exchange.outcome = ConnectOutcome::Completed;
        }
        let mut body =
            AnswerBody { inner, guard, links, exchange, stop, timeout, first, has_ended };
        body.read_first()?;
        let mut response = Response::new(body.into_streamed());
        (*response.status_mut(), *response.headers_mut()) = (status, headers);
        Ok(response)
    }

    /// Returns the list of the connections that the run may use.
    fn list_connections(&self) -> String {
        let spent = self.0.ledger.connection_spending();
        let listed = self.0.policy.listed_connections().map(|connection| {
            let spent = spent.get(&connection.name).copied().unwrap_or_default();
            let limits = &connection.limits;
            let left =
                |limit: Option<u64>, spent: u64| limit.map(|limit| limit.saturating_sub(spent));
            let mut listed = json!({
                "name": &*connection.name,
                "path": format!("{CONNECT_PATH_PREFIX}{}/", connection.name),
                "price_usd": connection.price,
                "limits": limits,
                "left": {
                    "requests": left(limits.requests, spent.requests),
                    "bytes_out": left(limits.bytes_out, spent.bytes_out),
                    "bytes_in": left(limits.bytes_in, spent.bytes_in),
                    "cost_usd": limits.cost_usd.map(|limit| limit.saturating_sub(spent.cost)),
                },
            });
            if let Some(address) = &connection.tunnel {
                listed["tunnel"] = address.to_text().into();
            }
            listed
        });
        json!({"connections": listed.collect::<Vec<_>>()}).to_string()
    }
}

impl StreamedEndpoint for RunConnections {
    fn handle_streamed(&self, request: StreamedRequest) -> StreamedReplyFuture<'_> {
        Box::pin(self.answer_request(request))
    }

    fn open_tunnel(&self, request: TunnelRequest<'_>) -> Result<OpenTunnel, Box<StreamedReply>> {
        self.0.admit_tunnel(&request).map_err(|refusal| {
            let asked = AskedHead { head: request.head, tunnel: None };
            Box::new(self.0.refuse_request((&refusal, asked), request.pid))
        })
    }

    fn kept_bytes(&self, request: &StreamedRequest) -> u64 {
        let StreamedRequest { request, tunnel, .. } = request;
        let named = ConnectionPolicy::named_connection(request.uri().path(), tunnel.as_deref());
        let found = self.0.policy.find_connection(named).ok();
        let length = request.body().size_hint().exact();
        found.and_then(Connection::signing).map_or(0, |signing| signing.kept_bytes(length))
    }
}

impl ConnectionParts {
    /// Reserves the budget of a request, reads the credential, and records the admission.
    async fn admit_request(
        self: Arc<Self>,
        call: ConnectCall,
    ) -> Result<AdmittedConnect, ConnectRefusal> {
        let connection = self.policy.find_connection(&call.connection);
        let connection = connection.map_err(ConnectRefusal::NotGranted)?;
        // 1. The operator's switch and the budget.
        self.check_accepting()?;
        // 2. The rules about what the run has seen.
        let announced_bytes = call.length.unwrap_or_default().min(MAX_ANNOUNCED_BYTES);
        let asked = (connection, announced_bytes);
        let reservation = reserve_request(&self.ledger, &self.taint, asked)?;
        // 3. The credential. It comes behind the budget, so that a refused request runs no program of the operator.
        let credential = match &connection.credential {
            None => None,
            Some(credential) => match credential.read_credential().await {
                Ok(read) => {
                    let owner = format!("{AGENT_PREFIX}{}", connection.name);
                    self.secrets.add_latest(&owner, &read.secrets());
                    Some(read)
                }
                Err(fault) => {
                    reservation.release_unspent();
                    return Err(match fault {
                        CredentialFault::Unavailable(problem) => {
                            ConnectRefusal::Credential(problem)
                        }
                        CredentialFault::Busy => ConnectRefusal::Overloaded,
                    });
                }
            },
        };
        // 4. The record. Only a durable record lets the request be sent.
        let request = format!("cr-{}", Uuid::now_v7().simple());
        let record = ConnectAdmittedRecord {
            request: &request,
            connection: &connection.name,
            method: call.method.as_str(),
            path: &call.path,
            rule: &call.rule,
            announced_bytes,
            bytes_out_limit: connection.limits.bytes_out.filter(|_| call.length.is_none()),
            bytes_in_limit: connection.limits.bytes_in,
            pid: call.pid,
            reserved: reservation.granted_amount(),
        };
        if let Err(error) = self.audit.record_connect_admission(&record).await {
            reservation.release_unspent();
            return Err(error.into());
        }
        // 5. The operator may have paused the run while the record was written.
        if let Err(refusal) = self.check_accepting() {
            reservation.release_unspent();
            let (unsent, nothing) = ((&*request, &*connection.name), Default::default());
            let outcome = ConnectOutcome::NotSent;
            let record = ConnectSettledRecord::for_lost_request(unsent, outcome, nothing);
            self.audit.record_connect_settlement(&record);
            return Err(refusal);
        }
        let exchange = ConnectExchange {
            connection: Arc::clone(&connection.name),
            parts: Arc::clone(&self),
            request,
            reservation: SharedReservation::new(reservation),
            started: Instant::now(),
            status: 0,
            outcome: ConnectOutcome::ClientGone,
        };
        Ok(AdmittedConnect { exchange, credential })
    }

    fn check_accepting(&self) -> Result<(), ConnectRefusal> {
        self.switches.check_accepting().map_err(|refusal| match refusal {
            ToolRefusal::Paused => ConnectRefusal::Paused,
            _ => ConnectRefusal::Ended,
        })
    }

    fn stop_signal(&self) -> StopSignal {
        StopSignal {
            run: self.switches.abort_token(),
            process: self.tasks.abort_token().clone(),
            deadline: self.ledger.deadline(),
        }
    }

    /// Records a refusal, and returns the reply.
    fn refuse_request(
        &self,
        (refusal, asked): (&ConnectRefusal, AskedHead<'_>),
        pid: Option<u32>,
    ) -> StreamedReply {
        self.record_refusal((refusal, asked), pid);
        let (response, code) = (refusal.to_response().map(full_body), Some(refusal.code()));
        StreamedReply { response, code, request_bytes: Arc::default() }
    }

    fn record_refusal(&self, (refusal, asked): (&ConnectRefusal, AskedHead<'_>), pid: Option<u32>) {
        if let ConnectRefusal::Credential(problem) = refusal {
            tracing::warn!(problem, "the credential of a connection cannot be read");
        }
        // Only a name that the configuration has is recorded: the client chooses any other.
        let named = || split_path(asked.head.uri.path()).map(|(name, _)| name);
        let name = asked.tunnel.or_else(named);
        let connection = name.filter(|name| self.policy.has_connection(name));
        let denial = refusal.denial();
        self.audit.record_connect_refusal(&ConnectRefusedRecord {
            code: refusal.code(),
            status: refusal.status().as_u16(),
            connection,
            method: asked.head.method.as_str(),
            layer: denial.map(|denial| denial.layer),
            rule: denial.map(|denial| &*denial.rule),
            path: Some(&self.path_digest(asked)),
            pid,
        });
        self.metrics.record_connect_refusal(refusal.code());
    }

    fn path_digest(&self, AskedHead { head, tunnel }: AskedHead<'_>) -> String {
        let target = match (head.uri.authority(), head.uri.path_and_query()) {
            (Some(authority), _) if head.method == Method::CONNECT => authority.as_str(),
            (_, Some(target)) => target.as_str(),
            (_, None) => "/",
        };
        // One path has one digest at one server, whether it came through a tunnel or not.
        let target = match (tunnel, split_path(head.uri.path())) {
            (Some(name), _) => {
                format!("{CONNECT_PATH_PREFIX}{name}{}", self.policy.path_below_url(name, target))
            }
            (None, Some((name, path))) => {
                let query = head.uri.query().map_or(String::new(), |query| format!("?{query}"));
                format!("{CONNECT_PATH_PREFIX}{name}{path}{query}")
            }
            (None, None) => target.to_owned(),
        };
        sha256_hex(format!("connect path 1\n{}\n{target}", self.salt).as_bytes())
    }
}

/// Sends a request with its credential, and waits for the head of the answer. An error is the outcome of the request.
async fn send_until_stopped(
    connection: &Connection,
    (mut request, credential): (Request<ConnectRequestBody>, Option<ReadCredential>),
    (stop, request_bytes): (&StopSignal, &AtomicU64),
) -> Result<Response<Incoming>, ConnectOutcome> {
    // A server is silent only while no byte of the request's body passes, either.
    let silence = async {
        let mut before = None;
        while before != Some(request_bytes.load(Ordering::Relaxed)) {
            before = Some(request_bytes.load(Ordering::Relaxed));
            tokio::time::sleep(connection.timeout).await;
        }
    };
    let reservation = request.body().reservation();
    let sending = async {
        if let Some(credential) = credential {
            credential.authorize_request(&mut request).await?;
        }
        connection.client.send_request(request).await
    };
    tokio::select! {
        biased;
        outcome = stop.wait_stopped() => Err(outcome),
        answer = sending => answer.map_err(|fault| match fault {
            SendFault::Address => ConnectOutcome::AddressRefused,
            SendFault::Busy => ConnectOutcome::NotSent,
            SendFault::Failed => reservation.failed_outcome(),
        }),
        () = silence => Err(ConnectOutcome::TimedOut),
    }
}

/// Checks the headers of a request that are not about its connection: the page that it comes from, and its protocol.
/// `own_origin` is the origin of the server, if the request came through a tunnel.
///
/// # Errors
/// Returns [`ConnectRefusal::ForeignOrigin`] or [`ConnectRefusal::Upgrade`].
fn check_headers(headers: &HeaderMap, own_origin: Option<&str>) -> Result<(), ConnectRefusal> {
    if !is_origin_known(headers, own_origin) {
        return Err(ConnectRefusal::ForeignOrigin);
    }
    if requests_upgrade(headers) {
        return Err(ConnectRefusal::Upgrade);
    }
    Ok(())
}

/// Returns true if a client requests a protocol other than `h2c`, which Java's client offers in each first request.
fn requests_upgrade(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::UPGRADE).iter();
    let mut protocols = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    protocols.any(|protocol| !protocol.trim_ascii().eq_ignore_ascii_case(b"h2c"))
}

/// Splits the path of a request into the connection's name and the path at its server; `None` for another path. A path
/// that ends with the name is the server's first path, as an address without a path is.
fn split_path(path: &str) -> Option<(&str, &str)> {
    let rest =
        path.strip_prefix(CONNECT_PATH_PREFIX).filter(|_| path != CONNECT_CERTIFICATE_PATH)?;
    Some(rest.find('/').map_or((rest, "/"), |end| rest.split_at(end)))
}

/// Returns the address by which the client reaches the gateway: a port of its own machine.
fn sandbox_url(headers: &HeaderMap) -> String {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let authority = host.and_then(|host| host.parse::<Authority>().ok());
    let is_own = |own: &Authority| own.host() == "localhost" && own.port_u16().is_some();
    match authority.filter(is_own) {
        Some(authority) => format!("http://localhost:{}", authority.port_u16().unwrap_or_default()),
        None => SANDBOX_URL.to_owned(),
    }
}

/// Returns the answer to a request that goes to no server.
fn own_answer(kind: &'static str, text: String) -> Response<StreamedBody> {
    let mut response = Response::new(full_body(text));
    let kind = header::HeaderValue::from_static(kind);
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn full_body(text: String) -> StreamedBody {
    Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed_unsync()
}

/// The most announced bytes that are reserved, recorded and charged after a crash. Our choice: no longer body ever ends, and
/// the sums of all requests stay within their type.
const MAX_ANNOUNCED_BYTES: u64 = 1 << 48;
