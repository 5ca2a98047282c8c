//! Calls to GitHub's REST API, and what its answers mean.
//!
//! octocrab carries the calls. What it would do on its own is done here, where it can be seen: no redirect is
//! followed, nothing is sent a second time, and no answer is read without an end.

mod error;
mod patience;
mod way;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, USER_AGENT};
use http::{HeaderName, HeaderValue, Method, Request, Uri};
use http_body_util::{BodyExt as _, Limited};
use octocrab::service::middleware::base_uri::BaseUriLayer;
use octocrab::service::middleware::extra_headers::ExtraHeadersLayer;
use octocrab::{AuthState, Octocrab, OctocrabBuilder};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::base;
use crate::base::secret::Secret;
use crate::git::Network;
use crate::relay::repository::Hosted;
use way::Way;

pub use error::{Error, Reason};
pub use patience::Patience;

/// Where the API is, and how long it may take.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// `https://api.github.com`, or `https://HOST/api/v3` of GitHub Enterprise.
    pub url: Uri,
    pub network: Network,
    /// For a connection.
    pub connect_timeout: Duration,
    /// For a call, its answer included.
    pub timeout: Duration,
    pub patience: Patience,
}

/// A client of one forge's API.
#[derive(Clone)]
pub struct Api {
    way: Way,
    config: Config,
}

/// What a repository says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct About {
    pub default_branch: String,
    #[serde(default)]
    pub archived: bool,
}

/// What a branch says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Branch {
    pub protected: bool,
}

/// What a query is answered with; what it found is left out.
#[derive(Deserialize)]
struct Answer {
    #[serde(default)]
    errors: Vec<QueryError>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct QueryError {
    #[serde(rename = "type")]
    kind: String,
    message: String,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            url: Uri::from_static("https://api.github.com"),
            network: Network::default(),
            connect_timeout: Duration::from_secs(10),
            timeout: Duration::from_secs(30),
            patience: Patience::default(),
        }
    }
}

impl Api {
    /// # Errors
    /// The authorities cannot be read.
    pub fn new(config: Config) -> io::Result<Self> {
        Ok(Self { way: Way::new(&config)?, config })
    }

    pub fn patience(&self) -> &Patience {
        &self.config.patience
    }

    /// Whether this API is the one of the repository's host, so that a token for one may be shown to the other.
    ///
    /// `https://api.github.com` is that of `github.com`; an Enterprise's own is on its host.
    pub fn serves(&self, repository: &Hosted) -> bool {
        let Some(api) = self.config.url.authority() else { return false };
        let (api, host) = (api.as_str().to_ascii_lowercase(), repository.authority());
        api.strip_prefix("api.").unwrap_or(&api) == host.to_ascii_lowercase()
            || api == host.to_ascii_lowercase()
    }

    /// # Errors
    /// As every call.
    pub async fn about(&self, token: &Secret, repository: &Hosted) -> Result<About, Error> {
        self.get(token, &path(repository, "")).await
    }

    /// What is known of a branch; `None` where there is none of that name.
    ///
    /// # Errors
    /// As every call.
    pub async fn branch(
        &self,
        token: &Secret,
        repository: &Hosted,
        branch: &str,
    ) -> Result<Option<Branch>, Error> {
        match self.get(token, &path(repository, &format!("/branches/{}", encoded(branch)))).await {
            Ok(branch) => Ok(Some(branch)),
            Err(Error::NotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub(super) async fn get<T: DeserializeOwned>(
        &self,
        token: &Secret,
        path: &str,
    ) -> Result<T, Error> {
        self.call(token, Method::GET, path, None::<&()>).await
    }

    /// One mutation of the API that is not REST, for what REST cannot do. What it answers is not needed.
    pub(super) async fn mutate(&self, token: &Secret, query: &str, id: &str) -> Result<(), Error> {
        let body = serde_json::json!({ "query": query, "variables": { "id": id } });
        let called = Box::pin(self.exchange(token, (Method::POST, GRAPH), Some(&body)));
        let answer: Answer = self.in_time(called).await?;
        match answer.errors.first() {
            Some(error) => Err(Error::of_query(&error.kind, &error.message)),
            None => Ok(()),
        }
    }

    /// One call, once: whoever may repeat it knows whether it may have been done already.
    pub(super) async fn call<T: DeserializeOwned>(
        &self,
        token: &Secret,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, Error> {
        self.in_time(Box::pin(self.exchange(token, (method, path), body))).await
    }

    async fn in_time<T>(&self, called: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
        match tokio::time::timeout(self.config.timeout, called).await {
            Ok(answered) => answered,
            Err(_elapsed) => {
                Err(Error::Unanswered(format!("nothing within {:?}", self.config.timeout)))
            }
        }
    }

    async fn exchange<T: DeserializeOwned>(
        &self,
        token: &Secret,
        (method, path): (Method, &str),
        body: Option<&impl Serialize>,
    ) -> Result<T, Error> {
        let client = self.client(token, self.base(path));
        let request = Request::builder().method(method).uri(path);
        let request = client.build_request(request, body).map_err(|error| unanswered(&error))?;
        let response = client.execute(request).await.map_err(|error| unanswered(&error))?;
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_LIMIT).collect().await;
        let body = body.map_err(|error| Error::Unanswered(error.to_string()))?.to_bytes();
        if !head.status.is_success() {
            return Err(Error::refused(&head, &body));
        }
        // The work is done; an answer that cannot be read is as good as one that was lost.
        serde_json::from_slice(&body).map_err(|error| Error::Unanswered(error.to_string()))
    }

    /// What a path is below. An Enterprise has the other API beside the REST API, not in it.
    fn base(&self, path: &str) -> Uri {
        let url = &self.config.url;
        let above = url.path().strip_suffix("/v3").filter(|_| path == GRAPH);
        let Some(above) = above else { return url.clone() };
        let mut parts = url.clone().into_parts();
        parts.path_and_query = above.parse().ok();
        Uri::from_parts(parts).unwrap_or_else(|_| url.clone())
    }

    /// octocrab for one token. It shows the token to the API's own address only.
    fn client(&self, token: &Secret, base: Uri) -> Octocrab {
        let headers: Arc<Vec<(HeaderName, HeaderValue)>> = Arc::new(vec![
            (USER_AGENT, HeaderValue::from_static(AGENT)),
            (ACCEPT, HeaderValue::from_static("application/vnd.github+json")),
        ]);
        let token = token.expose().to_owned().into();
        let (headers, base) = (ExtraHeadersLayer::new(headers), BaseUriLayer::new(base));
        let auth = AuthState::AccessToken { token };
        let empty = OctocrabBuilder::new_empty();
        let built = match self.way.clone() {
            Way::Straight(http) => empty
                .with_service(http)
                .with_layer(&headers)
                .with_layer(&base)
                .with_auth(auth)
                .build(),
            Way::Tunnel(http) => empty
                .with_service(http)
                .with_layer(&headers)
                .with_layer(&base)
                .with_auth(auth)
                .build(),
        };
        match built {
            Ok(client) => client,
            Err(never) => match never {},
        }
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("config", &self.config).finish_non_exhaustive()
    }
}

/// The API's address.
impl fmt::Display for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.config.url)
    }
}

/// Below a repository. Its parts are made of what a URL may have as it is.
pub(super) fn path(repository: &Hosted, rest: &str) -> String {
    format!("/repos/{}/{}{rest}", repository.owner(), repository.name())
}

/// Text as a part of a URL: a branch's name in a path, a value in a query.
pub(super) fn encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            let mut digits = [0; 2];
            base::hex::encode(&[byte], &mut digits);
            encoded.push('%');
            encoded.extend(digits.map(|digit| char::from(digit.to_ascii_uppercase())));
        }
    }
    encoded
}

fn unanswered(error: &octocrab::Error) -> Error {
    let mut why = String::new();
    let mut source: Option<&dyn std::error::Error> = Some(error);
    while let Some(error) = source {
        // octocrab repeats its cause; the last one says it best.
        why = error.to_string();
        source = error.source();
    }
    Error::Unanswered(why)
}

/// The API that is not REST.
const GRAPH: &str = "/graphql";

/// GitHub wants to know who calls.
const AGENT: &str = concat!("cogni-gateway/", env!("CARGO_PKG_VERSION"));

/// A page of pull requests has some hundred KiB, most of it addresses.
const ANSWER_LIMIT: usize = 4 << 20;
