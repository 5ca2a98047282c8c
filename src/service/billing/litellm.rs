//! LiteLLM's spend logs, read over its HTTP API.
//!
//! `/spend/logs/v2` returns pages and filters by end user. Older versions of LiteLLM have only `/spend/logs`, which
//! takes whole days, returns the latest 10,000 rows at most and ignores a filter by end user. For these versions the
//! client filters the rows itself. Pages also filter by one call's

use std::collections::{HashMap, hash_map};
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::ingest::{self, LitellmCallMetadata};
use super::{ChargeNotice, ChargeSource};
use crate::base;
use crate::base::interim_limit::InterimLimitConnector;
use crate::base::secret::SecretString;
use crate::base::shared_resolver::{SharedLookupConnector, SharedResolver};
use crate::base::timestamp;
use crate::base::url_component::encode_url_component;
use crate::gateway::upstream::{UpstreamScheme, UpstreamUrl};
use crate::llm::budget::{Nanodollars, Tokens};

/// The address of LiteLLM, and the credentials for its spend logs.
#[derive(Clone, Debug)]
pub struct LitellmConfig {
    pub url: UpstreamUrl,
    /// A key that may read spend logs: the master key, or an administrator's key.
    pub key: SecretString,
    /// The PEM file of authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
}

/// A client of one LiteLLM's spend logs.
pub struct LitellmClient {
    settings: LitellmConfig,
    client:
        legacy::Client<InterimLimitConnector<HttpsConnector<SharedLookupConnector>>, Empty<Bytes>>,
}

/// A filter for spend log rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpendLogWindow {
    pub since: SystemTime,
    pub until: SystemTime,
    /// LiteLLM's end user; `None` for all end users.
    pub account: Option<String>,
}

/// The rows of calls that came through one of our gateways.
#[derive(Clone, Debug, Default)]
pub struct SpendLogRows {
    /// The notices in the order in which the billing store ingests them: among the rows of one call, the row with the
    /// highest precedence comes first.
    pub notices: Vec<ChargeNotice>,
    /// The index of each row among the notices, by LiteLLM's own id of the row.
    by_id: HashMap<String, usize>,
    /// The number of rows that were read, including those of other callers.
    pub read: u64,
    /// The number of rows that cannot be parsed.
    pub invalid: u64,
    pub source: SpendLogSource,
    /// True if LiteLLM returned only the latest of a day's rows.
    pub is_partial: bool,
}

/// The endpoint from which the rows were read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SpendLogSource {
    #[default]
    Pages,
    /// `/spend/logs`, of a LiteLLM that has no pages.
    Days,
}

/// The reason for which LiteLLM returned no rows.
#[derive(Debug, thiserror::Error)]
pub enum LitellmError {
    #[error("cannot reach LiteLLM at `{url}`")]
    Unreachable { url: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("LiteLLM at `{url}` has not answered within {} s", REQUEST_TIMEOUT.as_secs())]
    Timeout { url: String },
    #[error("LiteLLM refuses to show its spend logs ({status}): {message}")]
    Refused { status: StatusCode, message: String },
    #[error("LiteLLM's spend logs cannot be parsed: {0}")]
    Malformed(#[from] serde_json::Error),
    #[error("LiteLLM has more than {} rows for this time; choose a shorter time", MAX_PAGES * PAGE_SIZE)]
    TooMany,
}

impl LitellmClient {
    /// # Errors
    /// Returns an error if the authorities cannot be read, or the system has none.
    pub fn new(settings: LitellmConfig) -> io::Result<Self> {
        let mut connector = SharedResolver::connector();
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let builder = HttpsConnectorBuilder::new();
        let builder = match &settings.ca_file {
            Some(path) => {
                let roots = base::tls::load_root_store(path).map_err(io::Error::other)?;
                let config = rustls::ClientConfig::builder().with_root_certificates(roots);
                builder.with_tls_config(config.with_no_client_auth())
            }
            None if settings.url.scheme() == UpstreamScheme::Https => {
                builder.with_native_roots()?
            }
            // Plain HTTP needs no authorities, so a machine without any must not fail here.
            None => {
                let none = rustls::ClientConfig::builder()
                    .with_root_certificates(rustls::RootCertStore::empty());
                builder.with_tls_config(none.with_no_client_auth())
            }
        };
        let connector = builder.https_or_http().enable_http1().wrap_connector(connector);
        let connector = InterimLimitConnector::new(connector);
        let client = legacy::Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { settings, client })
    }

    /// Reads the rows of a window.
    ///
    /// # Errors
    /// Returns an error if LiteLLM does not answer, refuses, or sends rows that cannot be parsed.
    pub async fn fetch_rows(&self, window: &SpendLogWindow) -> Result<SpendLogRows, LitellmError> {
        let mut rows = SpendLogRows::default();
        for page in 1..=MAX_PAGES {
            let answer = match self.get(&window.page_path(page)).await {
                Err(LitellmError::Refused { status, .. })
                    if page == 1 && is_not_found_status(status) =>
                {
                    // This LiteLLM has no pages, so the client reads whole days.
                    return self.fetch_days(window).await;
                }
                answer => answer?,
            };
            let SpendLogPage { data } = serde_json::from_slice(&answer)?;
            // A page that is not full is the last one; a full last page costs one more request.
            let is_last = data.len() < PAGE_SIZE;
            rows.extend(data, window);
            if is_last {
                return Ok(rows.into_sorted());
            }
        }
        Err(LitellmError::TooMany)
    }

    /// Reads the rows of one call. A call that LiteLLM retried may have more than one row. Returns `None` if LiteLLM
    /// has no pages and cannot filter by a call.
    ///
    /// # Errors
    /// Returns an error under the same conditions as [`fetch_rows`](Self::fetch_rows).
    pub async fn fetch_call(
        &self,
        id: &str,
        began: SystemTime,
    ) -> Result<Option<Vec<ChargeNotice>>, LitellmError> {
        // LiteLLM requires a time window beside the id. A day on each side allows for a different clock.
        let (since, until) = (began.checked_sub(DAY).unwrap_or(began), began + DAY);
        let window = SpendLogWindow { since, until, account: None };
        let mut path = window.page_path(1);
        path.push_str("&request_id=");
        path.extend(encode_url_component(id));
        let answer = match self.get(&path).await {
            Err(LitellmError::Refused { status, .. }) if is_not_found_status(status) => {
                return Ok(None);
            }
            answer => answer?,
        };
        let SpendLogPage { data } = serde_json::from_slice(&answer)?;
        let mut rows = SpendLogRows::default();
        // The same checks as for a page: rows without a run and rows outside the window are left out.
        rows.extend(data, &window);
        // A LiteLLM that ignores the filter returns other calls, too.
        rows.notices.retain(|row| row.call_id == id);
        Ok(Some(rows.into_sorted().notices))
    }

    async fn fetch_days(&self, window: &SpendLogWindow) -> Result<SpendLogRows, LitellmError> {
        let mut rows = SpendLogRows { source: SpendLogSource::Days, ..SpendLogRows::default() };
        let mut day = window.since;
        // Whole days in UTC, as LiteLLM counts them. The window filters the rows of the first and the last day.
        while format_date(day) <= format_date(window.until) {
            let answer = self.get(&SpendLogWindow::day_path(day)).await?;
            // `/spend/logs` answers a bare array, without a page object.
            let data: Vec<&RawValue> = serde_json::from_slice(&answer)?;
            // A full answer means that LiteLLM has cut the day's older rows.
            rows.is_partial |= data.len() >= MAX_ROWS_PER_DAY;
            rows.extend(data, window);
            day += DAY;
        }
        Ok(rows.into_sorted())
    }

    async fn get(&self, path: &str) -> Result<Bytes, LitellmError> {
        // `h2c` is our name for cleartext HTTP/2; the spend logs are read over HTTP/1 on the same address.
        let url = self.settings.url.to_string().replacen("h2c:", "http:", 1);
        let uri: Uri = format!("{url}{path}").parse().expect("what is escaped is a URL");
        let request = Request::get(uri)
            .header(header::ACCEPT, "application/json")
            .header(header::AUTHORIZATION, format!("Bearer {}", self.settings.key.expose_secret()))
            .body(Empty::new());
        let Ok(request) = request else {
            let source = "its key cannot be sent as a header".into();
            return Err(LitellmError::Unreachable { url, source });
        };
        // One timeout covers the connection, the head and the body, so that a slow body cannot hold the task.
        let ask = async {
            let response = self.client.request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>((status, body.to_bytes()))
        };
        match tokio::time::timeout(REQUEST_TIMEOUT, ask).await {
            Err(_elapsed) => Err(LitellmError::Timeout { url }),
            Ok(Err(source)) => Err(LitellmError::Unreachable { url, source }),
            // Every other status is a refusal with an excerpt of its body, which the operator reads.
            Ok(Ok((status, body))) if status.is_success() => Ok(body),
            Ok(Ok((status, body))) => {
                Err(LitellmError::Refused { status, message: error_excerpt(&body) })
            }
        }
    }
}

impl SpendLogWindow {
    fn page_path(&self, page: usize) -> String {
        let mut path = format!(
            "/spend/logs/v2?start_date={}&end_date={}&page={page}&page_size={PAGE_SIZE}&sort_by=startTime&sort_order=asc",
            format_time(self.since),
            format_time(self.until),
        );
        if let Some(account) = &self.account {
            path.push_str("&end_user=");
            path.extend(encode_url_component(account));
        }
        path
    }

    fn day_path(day: SystemTime) -> String {
        let (from, to) = (format_date(day), format_date(day + DAY));
        format!("/spend/logs?start_date={from}&end_date={to}&summarize=false")
    }
}

impl SpendLogRows {
    fn extend(&mut self, rows: Vec<&RawValue>, window: &SpendLogWindow) {
        for row in rows {
            self.read += 1;
            match parse_row(row) {
                // Rows of other callers of the same LiteLLM name no run of a gateway.
                Ok((_, notice)) if notice.run.is_none() => {}
                Ok((_, notice)) if !window.matches(&notice) => {}
                Ok((id, notice)) => self.add_notice(id, notice),
                Err(_) => self.invalid += 1,
            }
        }
    }

    /// Adds a notice once. A row of midnight is in the answers for both days, and a page may repeat rows of the
    /// previous page.
    fn add_notice(&mut self, id: String, notice: ChargeNotice) {
        match self.by_id.entry(id) {
            hash_map::Entry::Vacant(new) => {
                new.insert(self.notices.len());
                self.notices.push(notice);
            }
            hash_map::Entry::Occupied(known) => {
                // Of two copies of a row, the copy that counts more is kept.
                let known = &mut self.notices[*known.get()];
                if known.precedence() < notice.precedence() {
                    *known = notice;
                }
            }
        }
    }

    /// Sorts the notices by call and precedence. A call that LiteLLM retried has a row for each attempt.
    fn into_sorted(mut self) -> Self {
        self.by_id.clear();
        self.notices.sort_by(|one, other| {
            one.call_id.cmp(&other.call_id).then_with(|| other.precedence().cmp(&one.precedence()))
        });
        self
    }
}

impl SpendLogWindow {
    /// Returns true if a row is in the window, because an old LiteLLM ignores its filters.
    fn matches(&self, notice: &ChargeNotice) -> bool {
        let is_theirs = |account| notice.account.as_ref() == Some(account);
        (self.since..=self.until).contains(&notice.started)
            && self.account.as_ref().is_none_or(is_theirs)
    }
}

#[derive(Deserialize)]
struct SpendLogPage<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct SpendLogRow<'a> {
    request_id: String,
    /// The call's id. Old versions lack the field and use the call's id as the row's id if the provider sent none.
    litellm_call_id: Option<String>,
    status: Option<String>,
    spend: Option<Nanodollars>,
    prompt_tokens: u64,
    completion_tokens: u64,
    #[serde(rename = "startTime")]
    started: String,
    #[serde(rename = "endTime")]
    ended: String,
    end_user: Option<String>,
    model_group: Option<String>,
    model: Option<String>,
    #[serde(borrow, default)]
    metadata: Option<LitellmCallMetadata<'a>>,
}

/// Parses a row into LiteLLM's own id of the row and a notice.
fn parse_row(row: &RawValue) -> Result<(String, ChargeNotice), String> {
    let row: SpendLogRow<'_> =
        serde_json::from_str(row.get()).map_err(|error| ingest::error_reason(&error))?;
    let (run, deployment) =
        row.metadata.map(LitellmCallMetadata::run_and_deployment).unwrap_or_default();
    let id = row.request_id;
    let notice = ChargeNotice {
        // Old versions have the call's id only as the row's id.
        call_id: row.litellm_call_id.unwrap_or_else(|| id.clone()),
        source: ChargeSource::LitellmSpendLogs,
        run,
        deployment,
        account: row.end_user,
        model: row.model_group.filter(|name| !name.is_empty()).or(row.model),
        is_provisional: row.spend.is_none() || row.status.is_some_and(|status| status == "failure"),
        amount: row.spend.unwrap_or_default(),
        input: Tokens(row.prompt_tokens),
        output: Tokens(row.completion_tokens),
        started: parse_time(&row.started).ok_or("`startTime` is not a time")?,
        ended: parse_time(&row.ended).ok_or("`endTime` is not a time")?,
    };
    Ok((id, notice.validated()?))
}

/// Parses a time in UTC. One of LiteLLM's endpoints writes `…Z`, the other `…+00:00`, and some versions write no zone.
fn parse_time(text: &str) -> Option<SystemTime> {
    let text = text.trim_end_matches("+00:00").trim_end_matches('Z');
    humantime::parse_rfc3339_weak(text).ok()
}

fn format_time(time: SystemTime) -> String {
    timestamp::format_rfc3339_seconds(time).to_string().replace('T', "%20").replace('Z', "")
}

fn format_date(time: SystemTime) -> String {
    let text = timestamp::format_rfc3339_seconds(time).to_string();
    text.split('T').next().unwrap_or_default().to_owned()
}

fn is_not_found_status(status: StatusCode) -> bool {
    status == StatusCode::NOT_FOUND || status == StatusCode::METHOD_NOT_ALLOWED
}

/// Returns the beginning of an error's body, at most 200 characters on one line.
fn error_excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

/// The number of rows in a page: half of LiteLLM's maximum, because a row has some 10 KB.
const PAGE_SIZE: usize = 500;

/// The maximum number of pages of one query. Our choice.
const MAX_PAGES: usize = 2_000;

/// The maximum number of rows that `/spend/logs` returns: LiteLLM's `SPEND_LOGS_PAGINATION_COUNT_CAP`.
const MAX_ROWS_PER_DAY: usize = 10_000;

const DAY: Duration = Duration::from_hours(24);

/// The maximum size of an answer, in bytes. Our choice.
const MAX_RESPONSE_BYTES: usize = 256 << 20;

/// The maximum time to connect to LiteLLM. Our choice.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// The maximum time of a whole request to LiteLLM. Our choice.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(1);
