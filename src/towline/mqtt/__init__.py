"""MQTT packets, codecs and session, without sockets, threads, disk or clock; `towline.net` drives them."""
