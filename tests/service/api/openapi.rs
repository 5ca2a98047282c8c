//! A4: the service's description of itself.

use crate::support::service::Place;

/// Whoever makes a client from it is told of a change here.
#[tokio::test(flavor = "multi_thread")]
async fn the_description_is_served_to_everybody() {
    let place = Place::new("").await;
    let service = place.start();
    let response = place.client().get("/api/v1/openapi.json").await;
    assert_eq!(response.header("content-type"), Some("application/json"));
    let mut document = response.json();
    assert_eq!(document["openapi"], "3.1.0");
    document["info"]["version"] = "[version]".into();
    insta::assert_json_snapshot!(document);
    place.stop(service);
}
