//! One request and its response, from first byte to last, settled exactly once.
//!
//! Dropping an [`Exchange`] settles the budget and writes the records, so that a cancelled call is
//! accounted for like any other.

mod charge;
mod error_body;
mod followed;
mod sent;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{Method, Response};

use super::Gateway;
use super::admission::Admission;
use super::answer::{Answer, ClientReply};
use super::audience::Audience;
use super::budget_headers;
use super::dropped_fields;
use super::limits::RequestPermit;
use super::policy::Policy;
use super::receive::{self, Arriving, RequestBody};
use super::rejection::{Rejection, outcome_of};
use crate::audit::record::{Admitted, Outcome, Refused, Settled};
use crate::base::cancel_watch::CancelWatch;
use crate::base::header_lines::HeaderLines;
use crate::body::{Body, Call, What};
use crate::budget::{Amount, Entry, Nanodollars, Reservation, Source, Tokens, Usage};
use crate::observe::access_log::Line;
use crate::observe::metrics::{self, InFlight};
use crate::observe::trace;
use crate::protocol::{Protocol, Route};
use crate::run::RequestId;
use crate::stream::{Allowance, Format, Observer, UsageChunk};
use crate::upstream::headers::{self, ClientHead, Facts, Outgoing};
use crate::upstream::redactor::Redactor;
use crate::upstream::{self, ProviderAnswer};

use charge::Silence;
use error_body::ErrorBody;
pub use followed::{Broken, Followed};

/// A request being served. It rides in the response's body and ends with it.
#[expect(clippy::struct_excessive_bools, reason = "each is a fact of its own")]
pub struct Exchange {
    gateway: Arc<Gateway>,
    /// The one that was in force when the request came.
    pub(super) policy: Arc<Policy>,
    pub(super) id: RequestId,
    method: Method,
    /// Of the process that called, where it is known.
    pid: Option<u32>,
    route: Option<Route>,
    /// Who is told of a refusal.
    audience: Audience,
    started: Instant,
    request_bytes: u64,
    model: Option<Box<str>>,
    /// The rules that matched, or the one that refused.
    rules: Vec<Arc<str>>,
    stage: Stage,
    status: u16,
    code: Option<&'static str>,
    outcome: Outcome,
    facts: Facts,
    first_byte: Option<Duration>,
    last_frame: Instant,
    response_bytes: u64,
    frames: u64,
    reported: Option<Usage>,
    /// See [`Observer::output_at_least`].
    at_least: Tokens,
    /// See [`Observer::output_estimate`].
    estimate: Tokens,
    cost: Option<Nanodollars>,
    /// When the call went upstream.
    sent: Option<Instant>,
    silence: Silence,
    /// The upstream's own, where `status` is what the client sees.
    upstream_status: Option<u16>,
    /// The fields that do not go up, where there are any.
    dropped: Option<Box<str>>,
    /// Answers that the model writes.
    choices: u32,
    is_stream: bool,
    /// The answer has said itself that it has ended.
    has_finished: bool,
    /// The answer has come to its end, and the end was no error.
    is_whole: bool,
    /// The answer is of a form that is not read, or was lost in it.
    is_unreadable: bool,
    /// The model's metrics, once the upstream has accepted its name.
    metered: Option<Arc<metrics::Model>>,
    /// Cancelled when an operator cuts the call.
    cut: CancelWatch,
    /// The request's place among those in flight, and the bytes of its body; kept to the end, drains included.
    permit: Option<RequestPermit>,
    /// For an answer that is an error, or may be one.
    redactor: Option<Box<Redactor>>,
    /// For an answer that is an error.
    error_body: Option<Box<ErrorBody>>,
    /// What the text of an error is taken for.
    error_tokens: Tokens,
    _in_flight: InFlight,
}

/// How far a request has come.
enum Stage {
    /// Nothing is reserved; ending here is a refusal or an answer of our own.
    Arrived,
    /// It has a place among the open calls, and its body is being read; ending here is a refusal.
    Entered(Entry),
    /// Being written down. Ending here gives the reservation back: the log settles the record itself.
    Admitting(Reservation),
    /// Written down and reserved for; ending here must settle.
    Admitted(Reservation),
    /// Written down, but given back, since it never reached the upstream.
    Undelivered,
    /// Answered by ourselves.
    Answered,
}

impl Exchange {
    pub(super) fn begin(gateway: Arc<Gateway>, pid: Option<u32>, method: &Method) -> Box<Self> {
        let in_flight = gateway.metrics.begin();
        let cut = CancelWatch::new(gateway.run.gate.until_cut());
        let now = Instant::now();
        Box::new(Self {
            policy: gateway.policy.load_full(),
            gateway,
            id: RequestId::new(),
            method: method.clone(),
            pid,
            route: None,
            audience: Protocol::Chat.into(),
            started: now,
            request_bytes: 0,
            model: None,
            rules: vec![],
            stage: Stage::Arrived,
            status: 0,
            code: None,
            outcome: Outcome::ClientGone,
            facts: Facts::default(),
            first_byte: None,
            last_frame: now,
            response_bytes: 0,
            frames: 0,
            reported: None,
            at_least: Tokens::ZERO,
            estimate: Tokens::ZERO,
            cost: None,
            sent: None,
            silence: Silence::begin(now),
            upstream_status: None,
            dropped: None,
            choices: 1,
            is_stream: false,
            has_finished: false,
            is_whole: false,
            is_unreadable: false,
            metered: None,
            cut,
            permit: None,
            redactor: None,
            error_body: None,
            error_tokens: Tokens::ZERO,
            _in_flight: in_flight,
        })
    }

    pub(super) fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    pub(super) fn routed(&mut self, route: Route, head: &impl ClientHead) {
        self.route = Some(route);
        self.audience = Audience::of(route.protocol(), head);
    }

    /// Lets the request in by its head alone.
    pub(super) fn enter(&mut self, route: Route) -> Result<(), Rejection> {
        self.gateway.run.gate.check()?;
        self.permit = Some(self.gateway.capacity.admit()?);
        self.stage = Stage::Entered(self.admission().enter(route)?);
        Ok(())
    }

    /// Reads the body of a request that was let in.
    pub(super) async fn receive(
        &mut self,
        route: Route,
        body: &mut Arriving<impl RequestBody>,
    ) -> Result<Body, receive::Error> {
        let permit = self.permit.as_mut().expect("a request that was let in has a place");
        let body = body.receive(route, &self.policy.config, permit).await?;
        self.request_bytes = body.len();
        Ok(body)
    }

    /// Takes our credential out of an error's body, and of an event that is an error: all from there on is looked at. An
    /// event that a frame has begun and not ended may become one.
    fn redact(&mut self, frame: Bytes, may_be_error: bool) -> Bytes {
        if may_be_error && self.redactor.is_none() {
            self.redact_errors();
        }
        match &mut self.redactor {
            Some(redactor) => redactor.frame(&frame),
            None => frame,
        }
    }

    fn redact_errors(&mut self) {
        self.redactor = Some(Box::new(self.policy.overwrites.redactor()));
    }

    /// Gives back the bytes of the body, which is held no more.
    fn release_body(&mut self) {
        if let Some(permit) = &mut self.permit {
            permit.release_bytes();
        }
    }

    /// Tells the upstream which span of the run's trace the call is.
    pub(super) fn trace(&self, head: &mut Outgoing) {
        if let Some(trace) = &self.gateway.run.trace
            && self.policy.config.headers.traceparent
        {
            head.trace(&trace.traceparent(&self.id.span()));
        }
    }

    /// By what the call is judged.
    pub(super) fn admission(&self) -> Admission<'_> {
        let run = &self.gateway.run;
        Admission { policy: &self.policy, identity: &run.identity, ledger: &run.ledger }
    }

    pub(super) fn ruled(&mut self, rules: Vec<Arc<str>>) {
        self.rules = rules;
    }

    /// Reserves for the call and writes it down; only then may anything go upstream.
    pub(super) async fn admit(&mut self, route: Route, call: &mut Call) -> Result<(), Rejection> {
        self.gateway.run.gate.check()?;
        let gateway = Arc::clone(&self.gateway);
        let Stage::Entered(entry) = std::mem::replace(&mut self.stage, Stage::Arrived) else {
            unreachable!("a call is admitted once, after it was let in");
        };
        let reservation = self.admission().reserve(entry, route, call);
        self.model = call.model.take();
        let reservation = reservation?;
        let reserved = reservation.granted();
        self.stage = Stage::Admitting(reservation);
        let record = Admitted {
            request: self.id.as_str(),
            route: route.name(),
            model: self.model.as_deref(),
            rules: &self.rules,
            stream: call.stream,
            request_bytes: self.request_bytes,
            pid: self.pid,
            reserved,
        };
        let admitted = gateway.run.audit.admitted(&record).await;
        if let Stage::Admitting(reservation) = std::mem::replace(&mut self.stage, Stage::Arrived) {
            match admitted {
                // Whoever paused the run while the record was on its way to the disk wants no call to go out.
                Ok(()) => match gateway.run.gate.check() {
                    Ok(()) => self.stage = Stage::Admitted(reservation),
                    Err(shut) => {
                        reservation.release();
                        self.stage = Stage::Undelivered;
                        self.outcome = Outcome::NotSent;
                        return Err(shut.into());
                    }
                },
                Err(error) => {
                    reservation.release();
                    return Err(error.into());
                }
            }
        }
        gateway.run.counts.admitted.fetch_add(1, Ordering::Relaxed);
        for change in call.changes.iter().filter(|change| change.what == What::Dropped) {
            gateway.metrics.dropped_field(route, change.why.as_str());
        }
        self.dropped = dropped_fields::named(&call.changes);
        self.is_stream = call.stream;
        self.choices = call.choices;
        let now = Instant::now();
        self.sent = Some(now);
        self.silence = Silence::begin(now);
        Ok(())
    }

    /// Ends with an answer of our own, which costs nothing.
    pub(super) fn answer(mut self: Box<Self>, response: &Response<String>) {
        self.status = response.status().as_u16();
        self.response_bytes = response.body().len() as u64;
        self.outcome = Outcome::Completed;
        self.stage = Stage::Answered;
    }

    /// Ends with an error in the shape of the route's protocol.
    pub(super) fn reject(mut self: Box<Self>, rejection: &Rejection) -> ClientReply {
        let response = rejection.response(self.audience);
        self.status = response.status().as_u16();
        self.response_bytes = response.body().len() as u64;
        let mut answer = ClientReply::own(response);
        self.tell_budget(&mut answer.fields);
        self.code = Some(rejection.code());
        if let Rejection::Cut = rejection {
            self.outcome = Outcome::ShutDown;
        }
        if let Rejection::UpstreamAuth = rejection {
            self.outcome = Outcome::UpstreamFailed;
            self.gateway.metrics.upstream_error(rejection.code());
            // The upstream did nothing, and says so by its status.
            self.reported = Some(Usage { source: Source::Provider, ..Usage::default() });
        }
        if let Rejection::Rule(refusal) = rejection {
            self.rules = vec![refusal.rule()];
        }
        if let Rejection::Upstream(error) = rejection {
            self.fail(error);
            self.gateway.metrics.upstream_error(error.code());
            self.gateway.upstream.failures().failed(error);
            if error.is_undelivered()
                && let Stage::Admitted(reservation) =
                    std::mem::replace(&mut self.stage, Stage::Undelivered)
            {
                reservation.release();
                self.gateway.run.counts.unreached.fetch_add(1, Ordering::Relaxed);
            }
        }
        answer
    }

    /// Passes the answer on; the exchange ends when its body does.
    fn follow(mut self: Box<Self>, usage_chunk: UsageChunk, answer: ProviderAnswer) -> ClientReply {
        let ProviderAnswer { status, mut fields, body } = answer;
        if status.is_success() && is_encoded(&fields) {
            return self.reject(&upstream::Error::Malformed(ENCODED).into());
        }
        self.status = status.as_u16();
        self.upstream_status = Some(self.status);
        if status.is_success()
            // An answer that costs nothing vouches for no name: any name gets one.
            && self.route.is_some_and(Route::spends_tokens)
            && let Some(model) = &self.model
        {
            self.metered = Some(self.gateway.metrics.model(model));
        }
        let format = Format::of(fields.get("content-type"), fields.get("content-encoding"));
        if status.is_client_error() || status.is_server_error() {
            self.redact_errors();
            let is_json = format == Format::Json;
            let error_body = ErrorBody::new(self.audience.protocol, status, is_json);
            self.error_body = Some(Box::new(error_body));
        }
        self.policy.overwrites.remove_reflected(&mut fields);
        self.facts = headers::to_client(&mut fields, &self.policy.config.headers);
        if let Some(dropped) = &self.dropped {
            fields.push(dropped_fields::NAME, dropped.as_bytes());
        }
        self.tell_budget(&mut fields);
        self.is_unreadable = format == Format::Opaque;
        self.is_stream &= format != Format::Json;
        let mut observer = Observer::new(self.route.unwrap_or(Route::Models), format, usage_chunk);
        if let Some(allowance) = self.allowance() {
            observer = observer.limited(allowance);
        }
        ClientReply { status, fields, body: Answer::Followed(Followed::new(body, observer, self)) }
    }

    /// Tells the agent what is left beside this call: its turn is gone, its tokens are not yet known.
    fn tell_budget(&self, fields: &mut HeaderLines) {
        if !self.route.is_some_and(Route::spends_tokens) {
            return;
        }
        let own = match &self.stage {
            Stage::Admitted(reservation) => Amount { turns: 0, ..reservation.granted() },
            _ => Amount::default(),
        };
        budget_headers::tell(fields, &self.gateway.run.ledger.status_beside(own));
    }

    /// What holds the response to what was reserved for it; `None` where no budget limits it.
    fn allowance(&self) -> Option<Allowance> {
        let Stage::Admitted(reservation) = &self.stage else { return None };
        let (output, input) = (reservation.output_limit()?, reservation.granted().input);
        Some(Allowance { input, output, cutoff: self.policy.config.cutoff })
    }

    fn fail(&mut self, error: &upstream::Error) {
        self.code = Some(error.code());
        self.outcome = outcome_of(error);
    }

    /// Counts a frame that the upstream sent.
    fn frame(&mut self, length: usize) {
        let now = Instant::now();
        let gap = self.first_byte.map(|_| now.duration_since(self.last_frame));
        let model = self.metered.as_deref();
        if gap.is_none() {
            let elapsed = now.duration_since(self.started);
            self.first_byte = Some(elapsed);
            if let Some(model) = model {
                model.first_byte(elapsed);
            }
        }
        self.gateway.metrics.frame(model, gap, length);
        self.last_frame = now;
        self.frames += 1;
        self.response_bytes += length as u64;
    }

    fn settle(&self, usage: Usage, charged: Amount, now: Instant) {
        self.gateway.run.audit.settled(&Settled {
            request: self.id.as_str(),
            outcome: self.outcome,
            status: self.status,
            code: self.code,
            usage,
            charged,
            response_bytes: self.response_bytes,
            frames: self.frames,
            litellm_call_id: self.facts.call_id.as_deref(),
            litellm_response_cost: self.facts.response_cost.as_deref(),
            reported_cost_usd: self.cost,
            first_byte_ms: self.first_byte.map(milliseconds),
            duration_ms: milliseconds(now.duration_since(self.started)),
        });
    }

    fn refuse(&self, code: &'static str) {
        let (gateway, status) = (&self.gateway, self.status);
        gateway.run.counts.refused.fetch_add(1, Ordering::Relaxed);
        gateway.metrics.refused(&metrics::Refused { route: self.route, code, status });
        if self.code.is_none() {
            gateway.metrics.client_gone();
        }
        gateway.run.audit.refused(&Refused {
            request: self.id.as_str(),
            code,
            status,
            method: self.method.as_str(),
            route: self.route.map_or("-", Route::name),
            model: self.model.as_deref(),
            rules: &self.rules,
            request_bytes: self.request_bytes,
            exhausted: gateway.run.ledger.exhausted().is_cancelled(),
            pid: self.pid,
        });
    }

    /// Tells those who watch: the metrics and the trace, where a call was made, and the access log.
    fn tell(&self, usage: Option<Usage>, now: Instant) {
        let duration = now.duration_since(self.started);
        let Facts { call_id, response_cost } = &self.facts;
        let (call_id, cost) = (call_id.as_deref(), response_cost.as_deref());
        let trace = self.gateway.run.trace.as_deref().filter(|trace| trace.is_recorded());
        if let (Some(_), Some(route)) = (self.sent, self.route)
            && (usage.is_some() || trace.is_some())
        {
            let settled = metrics::Settled {
                route,
                model: &self.metered_model(),
                status: self.status,
                outcome: self.outcome,
                usage: &usage.unwrap_or_default(),
                cost: self.cost.or_else(|| cost.and_then(Nanodollars::parse)),
                request_bytes: self.request_bytes,
                response_bytes: self.response_bytes,
                first_byte: self.first_byte,
                duration,
                is_stream: self.is_stream,
            };
            if usage.is_some() {
                self.gateway.metrics.settled(&settled);
            }
            if let Some(trace) = trace {
                trace.call(&trace::Call {
                    span: self.id.span(),
                    request_id: self.id.as_str(),
                    model: self.model.as_deref(),
                    code: self.code,
                    settled: &settled,
                });
            }
        }
        self.gateway.access_log.write(&Line {
            time: SystemTime::now(),
            method: self.method.as_str(),
            route: self.route,
            status: if self.status == 0 { CLIENT_CLOSED_REQUEST } else { self.status },
            bytes: self.response_bytes,
            request_bytes: self.request_bytes,
            model: self.model.as_deref(),
            request_id: self.id.as_str(),
            litellm_call_id: call_id,
            litellm_response_cost: cost,
            upstream_time: self.sent.map(|sent| now.duration_since(sent)),
            first_byte_time: self.first_byte,
            request_time: duration,
            usage: usage.as_ref(),
            outcome: self.code.unwrap_or(self.outcome.as_str()),
        });
    }

    fn metered_model(&self) -> Arc<metrics::Model> {
        let seen = self.metered.clone();
        seen.unwrap_or_else(|| {
            self.gateway.metrics.known_model(self.model.as_deref().unwrap_or_default())
        })
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if self.outcome == Outcome::ClientGone && self.gateway.tasks.cut().is_cancelled() {
            self.outcome = Outcome::ShutDown;
        }
        let now = Instant::now();
        let usage = match std::mem::replace(&mut self.stage, Stage::Answered) {
            Stage::Arrived | Stage::Entered(_) => {
                self.refuse(self.code.unwrap_or("client_gone"));
                None
            }
            Stage::Admitting(reservation) => {
                reservation.release();
                self.refuse("client_gone");
                None
            }
            Stage::Answered => {
                self.gateway.metrics.answered(self.route, self.status);
                None
            }
            Stage::Undelivered => {
                self.gateway.metrics.answered(self.route, self.status);
                self.settle(Usage::default(), Amount::default(), now);
                None
            }
            Stage::Admitted(reservation) => {
                let usage = self.usage(reservation.granted(), now);
                let charged = reservation.settle(&usage);
                self.settle(usage, charged, now);
                Some(usage)
            }
        };
        self.tell(usage, now);
    }
}

/// Whether an answer is encoded, although the upstream was told that it may not be.
fn is_encoded(fields: &HeaderLines) -> bool {
    fields.get_all("content-encoding").any(|encoding| !encoding.eq_ignore_ascii_case(b"identity"))
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// nginx's status for a client that left before there was an answer; log readers know it.
const CLIENT_CLOSED_REQUEST: u16 = 499;

const ENCODED: &str = "an encoded answer, which was not asked for";
