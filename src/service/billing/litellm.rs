//! LiteLLM's spend logs, read over its HTTP API.
//!
//! `/spend/logs/v2` comes in pages and filters by end user. Before it there was `/spend/logs`, which takes whole days, gives the
//! latest 10,000 rows and no more, and ignores a filter by end user: there we look for ourselves. Pages filter by one call's
//! id, too, since LiteLLM keeps the ids that it is given by its caller (1.106.2, seen).

use std::collections::{HashMap, hash_map};
use std::fmt::Write;
use std::io;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{Request, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::ingest::{self, LitellmCallMetadata};
use super::{ChargeNotice, ChargeSource};
use crate::base;
use crate::base::secret::SecretString;
use crate::gateway::upstream::{UpstreamScheme, UpstreamUrl};
use crate::llm::budget::{Nanodollars, Tokens};

/// Where LiteLLM is, and how it is asked.
#[derive(Clone, Debug)]
pub struct LitellmConfig {
    pub url: UpstreamUrl,
    /// One that may read spend logs: the master key, or an administrator's.
    pub key: SecretString,
    /// PEM file of authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
}

/// Asks one LiteLLM.
pub struct LitellmClient {
    settings: LitellmConfig,
    client: legacy::Client<HttpsConnector<HttpConnector>, Empty<Bytes>>,
}

/// What rows are asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpendLogWindow {
    pub since: SystemTime,
    pub until: SystemTime,
    /// LiteLLM's end user; without one, everybody's.
    pub account: Option<String>,
}

/// Rows of calls that came through a gateway of ours.
#[derive(Clone, Debug, Default)]
pub struct SpendLogRows {
    /// In the order in which the books take them: of one call's rows the one that counts most comes first.
    pub notices: Vec<ChargeNotice>,
    /// The place of a row among the notices, by LiteLLM's own id of it.
    by_id: HashMap<String, usize>,
    /// All rows that were read, those of other callers too.
    pub read: u64,
    /// Rows that cannot be used.
    pub invalid: u64,
    pub way: SpendLogSource,
    /// Whether LiteLLM gave only the latest of a day's rows.
    pub is_partial: bool,
}

/// How they were got.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SpendLogSource {
    #[default]
    Pages,
    /// From a LiteLLM that has no pages.
    Days,
}

/// Why there are no rows.
#[derive(Debug, thiserror::Error)]
pub enum LitellmError {
    #[error("LiteLLM at `{url}` cannot be asked")]
    Unreachable { url: String, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("LiteLLM at `{url}` has not answered within {} s", REQUEST_TIMEOUT.as_secs())]
    Silent { url: String },
    #[error("LiteLLM refuses to show its spend logs ({status}): {message}")]
    Refused { status: StatusCode, message: String },
    #[error("LiteLLM's spend logs are not what they were: {0}")]
    Malformed(#[from] serde_json::Error),
    #[error("LiteLLM has more than {} rows for this; ask for less time", MAX_PAGES * PAGE_SIZE)]
    TooMany,
}

impl LitellmClient {
    /// # Errors
    /// The authorities cannot be read, or there are none.
    pub fn new(settings: LitellmConfig) -> io::Result<Self> {
        let mut connector = HttpConnector::new();
        connector.enforce_http(false);
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
            // Where there is no TLS, a machine without authorities will do.
            None => {
                let none = rustls::ClientConfig::builder()
                    .with_root_certificates(rustls::RootCertStore::empty());
                builder.with_tls_config(none.with_no_client_auth())
            }
        };
        let connector = builder.https_or_http().enable_http1().wrap_connector(connector);
        let client = legacy::Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { settings, client })
    }

    /// The rows of a window.
    ///
    /// # Errors
    /// LiteLLM is not there, refuses, or answers what is not understood.
    pub async fn fetch_rows(&self, window: &SpendLogWindow) -> Result<SpendLogRows, LitellmError> {
        let mut rows = SpendLogRows::default();
        for page in 1..=MAX_PAGES {
            let answer = match self.get(&window.page_path(page)).await {
                Err(LitellmError::Refused { status, .. })
                    if page == 1 && is_not_found_status(status) =>
                {
                    return self.fetch_days(window).await;
                }
                answer => answer?,
            };
            let SpendLogPage { data } = serde_json::from_slice(&answer)?;
            let is_last = data.len() < PAGE_SIZE;
            rows.extend(data, window);
            if is_last {
                return Ok(rows.into_sorted());
            }
        }
        Err(LitellmError::TooMany)
    }

    /// The rows of one call, of which a call that was tried again may have more than one; `None` from a LiteLLM that has
    /// no pages and so cannot be asked for one call.
    ///
    /// # Errors
    /// As there.
    pub async fn fetch_call(
        &self,
        id: &str,
        began: SystemTime,
    ) -> Result<Option<Vec<ChargeNotice>>, LitellmError> {
        // It wants a time beside the id, and its clock may be another.
        let (since, until) = (began.checked_sub(DAY).unwrap_or(began), began + DAY);
        let window = SpendLogWindow { since, until, account: None };
        let mut path = window.page_path(1);
        path.push_str("&request_id=");
        percent_encode(id, &mut path);
        let answer = match self.get(&path).await {
            Err(LitellmError::Refused { status, .. }) if is_not_found_status(status) => {
                return Ok(None);
            }
            answer => answer?,
        };
        let SpendLogPage { data } = serde_json::from_slice(&answer)?;
        let mut rows = SpendLogRows::default();
        rows.extend(data, &window);
        rows.notices.retain(|row| row.call_id == id);
        Ok(Some(rows.into_sorted().notices))
    }

    async fn fetch_days(&self, window: &SpendLogWindow) -> Result<SpendLogRows, LitellmError> {
        let mut rows = SpendLogRows { way: SpendLogSource::Days, ..SpendLogRows::default() };
        let mut day = window.since;
        while format_date(day) <= format_date(window.until) {
            let answer = self.get(&SpendLogWindow::day_path(day)).await?;
            let data: Vec<&RawValue> = serde_json::from_slice(&answer)?;
            rows.is_partial |= data.len() >= MAX_ROWS_PER_DAY;
            rows.extend(data, window);
            day += DAY;
        }
        Ok(rows.into_sorted())
    }

    async fn get(&self, path: &str) -> Result<Bytes, LitellmError> {
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
        let ask = async {
            let response = self.client.request(request).await?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await?;
            Ok::<_, Box<dyn std::error::Error + Send + Sync>>((status, body.to_bytes()))
        };
        match tokio::time::timeout(REQUEST_TIMEOUT, ask).await {
            Err(_elapsed) => Err(LitellmError::Silent { url }),
            Ok(Err(source)) => Err(LitellmError::Unreachable { url, source }),
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
            percent_encode(account, &mut path);
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
                Ok((_, notice)) if notice.run.is_none() => {}
                Ok((_, notice)) if !window.matches(&notice) => {}
                Ok((id, notice)) => self.add_notice(id, notice),
                Err(_) => self.invalid += 1,
            }
        }
    }

    /// A row of midnight is in the answers for both days, and a page may begin with rows of the page before.
    fn add_notice(&mut self, id: String, notice: ChargeNotice) {
        match self.by_id.entry(id) {
            hash_map::Entry::Vacant(new) => {
                new.insert(self.notices.len());
                self.notices.push(notice);
            }
            hash_map::Entry::Occupied(known) => {
                let known = &mut self.notices[*known.get()];
                if known.precedence() < notice.precedence() {
                    *known = notice;
                }
            }
        }
    }

    /// A call that LiteLLM tried again has a row for each attempt.
    fn into_sorted(mut self) -> Self {
        self.by_id.clear();
        self.notices.sort_by(|one, other| {
            one.call_id.cmp(&other.call_id).then_with(|| other.precedence().cmp(&one.precedence()))
        });
        self
    }
}

impl SpendLogWindow {
    /// What a filter of LiteLLM's should have seen to.
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
    /// Missing from old versions, which had it as the row's id where the provider gave none.
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

/// What a row says, with LiteLLM's own id of the row.
fn parse_row(row: &RawValue) -> Result<(String, ChargeNotice), String> {
    let row: SpendLogRow<'_> =
        serde_json::from_str(row.get()).map_err(|error| ingest::error_reason(&error))?;
    let (run, deployment) =
        row.metadata.map(LitellmCallMetadata::run_and_deployment).unwrap_or_default();
    let id = row.request_id;
    let notice = ChargeNotice {
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

/// One of its doors writes `…Z`, the other `…+00:00`, and some versions nothing; all mean UTC.
fn parse_time(text: &str) -> Option<SystemTime> {
    let text = text.trim_end_matches("+00:00").trim_end_matches('Z');
    humantime::parse_rfc3339_weak(text).ok()
}

fn format_time(time: SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string().replace('T', "%20").replace('Z', "")
}

fn format_date(time: SystemTime) -> String {
    let text = humantime::format_rfc3339_seconds(time).to_string();
    text.split('T').next().unwrap_or_default().to_owned()
}

/// Everything but what is safe anywhere in a URL (RFC 3986, section 2.3).
fn percent_encode(text: &str, into: &mut String) {
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => {
                into.push(byte.into());
            }
            _ => write!(into, "%{byte:02X}").expect("a String takes every write"),
        }
    }
}

fn is_not_found_status(status: StatusCode) -> bool {
    status == StatusCode::NOT_FOUND || status == StatusCode::METHOD_NOT_ALLOWED
}

/// Of an error's body as much as fits in a line.
fn error_excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).take(200).collect()
}

/// Half of what LiteLLM gives at most: a row has some 10 KB.
const PAGE_SIZE: usize = 500;

const MAX_PAGES: usize = 2_000;

/// LiteLLM's `SPEND_LOGS_PAGINATION_COUNT_CAP`.
const MAX_ROWS_PER_DAY: usize = 10_000;

const DAY: Duration = Duration::from_hours(24);

const MAX_RESPONSE_BYTES: usize = 256 << 20;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

const REQUEST_TIMEOUT: Duration = Duration::from_mins(1);
